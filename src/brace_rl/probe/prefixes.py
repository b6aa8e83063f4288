"""Where the responses to be cut come from: sampled afresh, or read from ``rollouts.jsonl``."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from brace_rl.config import Config
from brace_rl.errors import DataError
from brace_rl.probe.states import Response
from brace_rl.tasks.base import Task
from brace_rl.training.engines.base import Engine
from brace_rl.training.rollout import RolloutDriver
from brace_rl.training.types import RolloutRequest, SamplingParams, Trajectory, derive_seed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROLLOUTS = "rollouts.jsonl"


def sample_responses(
    count: int,
    *,
    engine: Engine,
    task: Task,
    tokenizer: PreTrainedTokenizerBase,
    config: Config,
    seed: int,
    progress: Callable[[int], None] = lambda finished: None,
) -> list[Response]:
    """One response under the engine's weights to each of the first ``count`` held-out problems (or to all there are).

    Responses that the environment could not judge are left out.

    Raises:
        DataError: there are no held-out problems, or no response was judged.
    """
    problems = list(task.eval_problems()[:count])
    if not problems:
        raise DataError("the task has no held-out problems to cut responses to; use --prefixes rollouts")
    rollout = config.rollout
    driver = RolloutDriver(
        engine,
        task,
        tokenizer,
        max_prompt_tokens=rollout.max_prompt_tokens,
        environment_timeout_s=config.schedule.timeout_s / 2,
    )
    driver.submit(
        [
            RolloutRequest(
                index=index,
                problem=problem,
                samples=1,
                issued_version=engine.version,
                sampling=SamplingParams(rollout.temperature, rollout.top_p, rollout.top_k),
                max_response_tokens=rollout.max_response_tokens,
                seed=derive_seed(seed, "prefix", problem.id),
            )
            for index, problem in enumerate(problems)
        ]
    )
    found: dict[int, Trajectory] = {}
    while driver.unfinished:
        for group in driver.advance():
            found[group.request.index] = group.trajectories[0]
            progress(len(found))
    judged = [(problem, found[index]) for index, problem in enumerate(problems) if not found[index].excluded]
    if not judged:
        raise DataError(f"none of the {len(problems)} responses could be judged; see that the judge answers")
    return [
        Response(problem, tuple(t.prompt_ids), tuple(t.response_ids), tuple(t.policy_mask)) for problem, t in judged
    ]


def logged_responses(
    run_dir: Path,
    count: int,
    *,
    task: Task,
    tokenizer: PreTrainedTokenizerBase,
    step: int,
    behavior_step: int,
) -> list[Response]:
    """Logged responses consumed up to trainer step ``step``, at most one to a prompt: those whose tokens were sampled
    by weights closest to ``behavior_step``, in mean over the policy tokens, and of equally close ones the latest.

    Raises:
        DataError: no such file, a row that is not a logged response, a problem the task does not have, or no rows.
    """
    path = run_dir / ROLLOUTS
    problems = {problem.id: problem for problem in task.train_problems()}
    best: dict[str, tuple[float, int, dict[str, Any]]] = {}
    for line, row in _rows(path):
        if row["prompt_id"] not in problems:
            raise DataError(
                f"{path}, line {line}: prompt_id {row['prompt_id']!r} is no training problem of this run's task"
            )
        versions = [v for v, is_policy in zip(row["versions"], row["policy_mask"], strict=True) if is_policy]
        if row["step"] > step or not versions:
            continue
        candidate = (abs(fmean(versions) - behavior_step), -line, row)
        if row["prompt_id"] not in best or candidate[:2] < best[row["prompt_id"]][:2]:
            best[row["prompt_id"]] = candidate
    if not best:
        raise DataError(f"{path}: holds no response consumed up to step {step}; use --prefixes fresh")
    chosen = sorted(best.values(), key=lambda candidate: candidate[:2])[:count]
    return [
        Response(
            problem=problems[row["prompt_id"]],
            prompt_ids=tuple(task.prompt_ids(problems[row["prompt_id"]], tokenizer)),
            response_ids=tuple(row["token_ids"]),
            policy_mask=tuple(bool(is_policy) for is_policy in row["policy_mask"]),
        )
        for _, _, row in chosen
    ]


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, row) of every logged response."""
    try:
        with path.open(encoding="utf-8") as file:
            for line, text in enumerate(file, start=1):
                yield line, _row(path, line, text)
    except OSError:
        raise DataError(
            f"{path}: cannot be read; use --prefixes fresh, or train with run.rollouts_per_step above 0"
        ) from None


def _row(path: Path, line: int, text: str) -> dict[str, Any]:
    try:
        row = json.loads(text)
        lengths = {len(row[name]) for name in ("token_ids", "policy_mask", "versions")}
        is_sound = len(lengths) == 1 and isinstance(row["step"], int) and isinstance(row["prompt_id"], str)
    except (ValueError, KeyError, TypeError):
        is_sound = False
    if not is_sound:
        raise DataError(
            f"{path}, line {line}: not a logged response (step, prompt_id, and token_ids, policy_mask and versions of "
            "one length)"
        )
    assert isinstance(row, dict)
    return row
