"""Data sets of reasoning-gym: procedural problems, each with its own scorer.

The policy answers in one turn; what stands in its first ``<answer></answer>`` is scored, and scores between 0 and 1 are
the reward. Problems of a run are the entries of the data set under a seed made from the run's; held-out problems have a
seed of their own, the same for every run, and a question that occurs among them is not trained on.

Some scorers of the package evaluate the answer as Python. Those are given plain expressions and literals only; any
other answer is right if it is the data set's own, word for word, and wrong otherwise.
"""

from __future__ import annotations

import asyncio
import difflib
import functools
import hashlib
import importlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from brace_rl.errors import ConfigError
from brace_rl.tasks.adapters.plain import evaluates_answers, is_plain
from brace_rl.tasks.adapters.settings import ReasoningGymSettings
from brace_rl.tasks.base import Environment, Problem, Task
from brace_rl.tasks.tools import ANSWER_TAG, UNANSWERED, ToolEnvironment, Verdict, Verifier, closing, first_block

EVALUATION_SEED = 0
"""Entry ``i`` of a data set draws from seed + ``i``; training seeds are far above, see :func:`training_seed`."""
_INSTRUCTIONS = "Think step by step. Give the final answer between <answer> and </answer>."


def training_seed(seed: int) -> int:
    """Of the data set a run trains on: between 2^30 and 2^31."""
    digest = hashlib.blake2b(f"reasoning-gym/{seed}".encode(), digest_size=4).digest()
    return 2**30 + int.from_bytes(digest, "little") % 2**30


class ReasoningGymTask(Task):
    """See the module's docstring.

    Raises:
        ConfigError: the package is missing, or has no such data set, or the data set refuses its options.
    """

    Settings = ReasoningGymSettings
    stop = (closing(ANSWER_TAG),)

    def __init__(self, settings: ReasoningGymSettings, *, seed: int) -> None:
        self._settings = settings
        self._options = json.dumps(settings.options, sort_keys=True)
        self._seed = training_seed(seed)
        self._eval = self._problems(EVALUATION_SEED, settings.eval_problems)
        self._train: list[Problem] = []

    def train_problems(self) -> Sequence[Problem]:
        """Made when first asked for: an evaluation needs none.

        Raises:
            ConfigError: every one of them is also held out.
        """
        if not self._train:
            held = {str(problem.prompt) for problem in self._eval}
            train = self._problems(self._seed, self._settings.train_problems)
            self._train = [problem for problem in train if str(problem.prompt) not in held]
            if not self._train:
                raise ConfigError(
                    f"task.dataset: every problem of {self._settings.dataset} is also held out; lower "
                    f"task.eval_problems or widen task.options"
                )
        return self._train

    def eval_problems(self) -> Sequence[Problem]:
        return self._eval

    def environment(self, problem: Problem) -> Environment:
        scorer = _Scorer(
            dataset=self._settings.dataset,
            options=self._options,
            seed=int(problem.metadata["seed"]),
            size=int(problem.metadata["size"]),
            index=int(problem.metadata["index"]),
            success_score=self._settings.success_score,
        )
        return ToolEnvironment(tools={}, verifier=scorer, max_turns=1)

    def _problems(self, seed: int, count: int) -> list[Problem]:
        """The first ``count`` entries without those that ask what an earlier one asks."""
        dataset = _dataset(self._settings.dataset, self._options, seed, count)
        problems: dict[str, Problem] = {}
        for index in range(count):
            entry = dataset[index]
            question = str(entry["question"])
            problem = Problem(
                id=f"{self._settings.dataset}/{seed}/{index}",
                prompt=({"role": "user", "content": f"{question}\n\n{_INSTRUCTIONS}"},),
                answer="" if entry["answer"] is None else str(entry["answer"]),
                metadata={"seed": seed, "size": count, "index": index},
            )
            problems.setdefault(question, problem)
        return list(problems.values())


@dataclass(frozen=True)
class _Scorer(Verifier):
    """Scores with the data set's own function, on the entry the data set makes again from its seed and number."""

    dataset: str
    options: str
    seed: int
    size: int
    index: int
    success_score: float

    async def judge(self, turn: str) -> Verdict:
        block = first_block(turn, (ANSWER_TAG,))
        if block is None:
            return UNANSWERED
        # In a thread: some scorers solve the problem to judge an answer.
        score = await asyncio.to_thread(self._score, block.content.strip())
        return Verdict(reward=score, success=score >= self.success_score, answered=True)

    def _score(self, answer: str) -> float:
        dataset = _dataset(self.dataset, self.options, self.seed, self.size)
        entry = dataset[self.index]
        module = sys.modules[type(dataset).__module__]
        if (self.dataset == "composite" or evaluates_answers(module)) and not is_plain(answer):
            return float(answer == entry["answer"])
        return float(dataset.score_answer(answer, entry))


@functools.lru_cache(maxsize=16)
def _dataset(name: str, options: str, seed: int, size: int) -> Any:
    try:
        gym = importlib.import_module("reasoning_gym")
        known = importlib.import_module("reasoning_gym.factory").DATASETS
    except ImportError:
        raise ConfigError("task.name: reasoning_gym needs its package; pip install reasoning-gym") from None
    if name not in known:
        close = difflib.get_close_matches(name, known, n=3)
        hint = f"did you mean {' or '.join(close)}?" if close else f"it has {', '.join(sorted(known))}"
        raise ConfigError(f"task.dataset: reasoning-gym has no data set {name!r}; {hint}")
    try:
        return gym.create_dataset(name, seed=seed, size=size, **json.loads(options))
    except (TypeError, AssertionError, ValueError) as error:
        raise ConfigError(f"task.options: {name} refuses them: {' '.join(str(error).split())}") from None
