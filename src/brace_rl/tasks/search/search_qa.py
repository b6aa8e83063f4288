"""Questions with short answers over a corpus of passages, in Search-R1's format, scored by exact match.

Data, corpus and metrics: ``docs/tasks_search.md``. The reward is 1 for an exact match with one of the gold answers and
0 otherwise; F1 is reported beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from brace_rl.errors import ConfigError
from brace_rl.tasks.base import Environment, Problem, Task
from brace_rl.tasks.search.environment import Layout, SearchEnvironment, stop_texts
from brace_rl.tasks.search.judge import AnswerVerifier, RuleJudge
from brace_rl.tasks.search.passages import render_passages
from brace_rl.tasks.search.prompts import RETRY, search_instructions
from brace_rl.tasks.search.questions import Question, split_questions
from brace_rl.tasks.search.retrievers import FileRetriever, HttpRetriever, Retriever
from brace_rl.tasks.search.settings import SearchQaSettings
from brace_rl.tasks.search.tools import SEARCH_TAG, SearchTool


class SearchQaTask(Task):
    """See the module's docstring.

    Args:
        seed: unused; problems keep the order of the file.

    Raises:
        ConfigError: there is neither a corpus nor a retriever.
        DataError: data, corpus or index cannot be used.
    """

    Settings = SearchQaSettings

    def __init__(self, settings: SearchQaSettings, *, seed: int) -> None:
        self._settings = settings
        self.max_observation_tokens = settings.max_observation_tokens
        self.stop = stop_texts((SEARCH_TAG,), max_calls=settings.max_calls_per_turn)
        train, evaluation = split_questions(
            settings.data,
            settings.eval_data,
            most_train=settings.train_problems,
            held_out=settings.eval_problems,
            skip_unanswered=settings.skip_unanswered,
        )
        self._retriever = _retriever(settings)
        self._train, self._eval = self._problems(train), self._problems(evaluation)

    def train_problems(self) -> Sequence[Problem]:
        return self._train

    def eval_problems(self) -> Sequence[Problem]:
        return self._eval

    def environment(self, problem: Problem) -> Environment:
        settings = self._settings
        render = partial(render_passages, limit=settings.passage_chars)
        return SearchEnvironment(
            tools={SEARCH_TAG: SearchTool(self._retriever, settings.top_k, render)},
            verifier=AnswerVerifier(RuleJudge(), problem.metadata["question"], tuple(problem.metadata["golds"])),
            layout=Layout(before="\n\n", after="\n\n", retry=RETRY, chat=True),
            stop=self.stop,
            max_turns=settings.max_turns,
            max_calls=settings.max_calls_per_turn,
            tool_timeout_s=settings.tool_timeout_s,
        )

    def _problems(self, questions: Sequence[Question]) -> list[Problem]:
        settings = self._settings
        instructions = search_instructions(searches=settings.max_turns - 1, max_calls=settings.max_calls_per_turn)
        return [question.problem(instructions) for question in questions]


def _retriever(settings: SearchQaSettings) -> Retriever:
    if settings.retriever_url:
        return HttpRetriever(settings.retriever_url, settings.tool_timeout_s, settings.retriever_retries)
    if not settings.corpus:
        raise ConfigError(
            "task.corpus: search_qa needs documents to search; give a .jsonl corpus, or a server as task.retriever_url"
        )
    return FileRetriever(Path(settings.corpus), Path(settings.index) if settings.index else None)
