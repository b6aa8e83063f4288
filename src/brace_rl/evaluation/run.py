"""Runs an evaluation: the same driver and engine as training, one record per answer, resumable."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from brace_rl.errors import BraceError, ConfigError, DataError
from brace_rl.evaluation.metrics import summarize
from brace_rl.evaluation.records import RecordLog, write_table
from brace_rl.files import write_json_atomic
from brace_rl.tasks.base import Problem, Task
from brace_rl.tasks.settings import TaskSettings
from brace_rl.training.engines.base import Engine
from brace_rl.training.rollout import RolloutDriver
from brace_rl.training.types import RolloutGroup, RolloutRequest, SamplingParams, Trajectory, derive_seed

SETTINGS = "evaluation.json"
SUMMARY = "summary.json"
WEIGHT_SAMPLE_BYTES = 1 << 20
"""Read from both ends of a weight file to tell models apart."""
WAITING_PER_SLOT = 2
"""Answers queued or in flight per slot of the engine: enough to keep it full."""
ENVIRONMENT_TIMEOUT_S = 600.0
"""Longest a step of an environment may wait; tools have limits of their own, far below."""


@dataclass(frozen=True)
class EvaluationSettings:
    """What is asked of the model; together with task and model it decides every record.

    Attributes:
        samples: answers per problem.
        limit: first problems used; 0: all.
    """

    samples: int
    sampling: SamplingParams
    max_prompt_tokens: int
    max_response_tokens: int
    limit: int
    seed: int


def fingerprint(
    settings: EvaluationSettings, task: TaskSettings, *, model: str, dtype: str, data: Path | None
) -> dict[str, Any]:
    """What two evaluations must share for the records of one to count for the other."""
    return {
        "settings": asdict(settings),
        "task": json.loads(task.model_dump_json()),
        "data_sha256": None if data is None else _file_digest(data),
        "model": model,
        "model_files": _model_files(Path(model)),
        "dtype": dtype,
    }


def open_log(folder: Path, identity: Mapping[str, Any]) -> RecordLog:
    """The records of this evaluation, those of an earlier start included.

    Raises:
        ConfigError: the folder holds another evaluation, or other files.
    """
    path = folder / SETTINGS
    known = json.loads(json.dumps(identity))
    if path.exists():
        try:
            before = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            raise ConfigError(f"{path}: not readable; choose another --out") from None
        changed = _first_difference(before, known)
        if changed is not None:
            raise ConfigError(
                f"{folder}: holds an evaluation with another {changed}; choose another --out, or delete the folder"
            )
    elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder}: holds other files; choose another --out")
    else:
        write_json_atomic(path, known)
    return RecordLog(folder)


def run_evaluation(
    *,
    folder: Path,
    identity: Mapping[str, Any],
    settings: EvaluationSettings,
    task: Task,
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    slots: int,
    progress: Callable[[int, int, float], None] = lambda done, total, success: None,
) -> dict[str, Any]:
    """Answer what is not answered yet, then write ``records.parquet`` and ``summary.json``; the summary.

    Args:
        slots: of the engine.
        progress: called with problems done, all problems, and the success so far.

    Raises:
        BraceError: no problems, ids that occur twice, a prompt that does not fit, a reward that is not finite, or a
            folder that holds something else.
    """
    problems = _checked(list(task.eval_problems() or ())[: settings.limit or None])
    started = time.monotonic()
    with closing(open_log(folder, identity)) as log:
        todo = [(index, problem) for index, problem in enumerate(problems) if problem.id not in log.finished]
        resumed = len(problems) - len(todo)
        driver = RolloutDriver(
            engine,
            task,
            tokenizer,
            max_prompt_tokens=settings.max_prompt_tokens,
            environment_timeout_s=ENVIRONMENT_TIMEOUT_S,
        )
        progress(resumed, len(problems), _success(log))
        requests = [_request(index, problem, settings, engine.version) for index, problem in todo]
        for group in _answered(driver, requests, most_waiting=WAITING_PER_SLOT * slots):
            gold = group.request.problem.answer
            log.add(group.request.problem.id, [_record(t, gold, tokenizer) for t in group.trajectories])
            progress(len(log.finished), len(problems), _success(log))
        records = [record for problem in problems for record in log.finished[problem.id]]
    write_table(folder, records)
    summary = {
        **summarize(records, samples=settings.samples, seed=settings.seed),
        "model": identity["model"],
        "task": identity["task"]["name"],
        "settings": identity["settings"],
        "resumed_problems": resumed,
        "seconds": time.monotonic() - started,
    }
    write_json_atomic(folder / SUMMARY, summary)
    return summary


def _answered(
    driver: RolloutDriver, requests: Sequence[RolloutRequest], *, most_waiting: int
) -> Iterator[RolloutGroup]:
    """Answers as they come, with no more queued than keeps the engine full."""
    waiting = 0
    queue = list(reversed(requests))
    while queue or driver.unfinished:
        batch: list[RolloutRequest] = []
        while queue and (waiting == 0 or waiting + queue[-1].samples <= most_waiting):
            batch.append(queue.pop())
            waiting += batch[-1].samples
        if batch:
            driver.submit(batch)
        for group in driver.advance():
            waiting -= group.request.samples
            yield group


def _request(index: int, problem: Problem, settings: EvaluationSettings, version: int) -> RolloutRequest:
    return RolloutRequest(
        index=index,
        problem=problem,
        samples=settings.samples,
        issued_version=version,
        sampling=settings.sampling,
        max_response_tokens=settings.max_response_tokens,
        # Of the problem alone, so that a resumed evaluation draws what an uninterrupted one would have drawn.
        seed=derive_seed(settings.seed, "evaluation", problem.id),
    )


def _record(trajectory: Trajectory, gold: str, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    return {
        "problem_id": trajectory.problem_id,
        "sample": trajectory.sample_index,
        "gold": gold,
        "response": str(tokenizer.decode(trajectory.response_ids, skip_special_tokens=False)),
        "success": trajectory.success,
        "reward": trajectory.reward,
        "excluded": trajectory.excluded,
        "truncated": trajectory.truncated,
        "turns": trajectory.turns,
        "prompt_tokens": len(trajectory.prompt_ids),
        "response_tokens": len(trajectory.response_ids),
        "info": {name: float(value) for name, value in trajectory.info.items()},
    }


def _checked(problems: list[Problem]) -> list[Problem]:
    if not problems:
        raise DataError("the task has no problems to evaluate on")
    seen: set[str] = set()
    for problem in problems:
        if problem.id in seen:
            raise DataError(f"problem id {problem.id!r} occurs twice; ids must be unique")
        seen.add(problem.id)
    return problems


def _success(log: RecordLog) -> float:
    judged = [answer["success"] for answers in log.finished.values() for answer in answers if not answer["excluded"]]
    return sum(judged) / len(judged) if judged else 0.0


def _first_difference(before: Any, now: Any, key: str = "") -> str | None:
    """The first key, dotted, under which two JSON values differ, with both values where they are short."""
    if isinstance(before, dict) and isinstance(now, dict):
        for name in sorted({*before, *now}):
            inner = f"{key}.{name}" if key else str(name)
            found = _first_difference(before.get(name), now.get(name), inner)
            if found is not None:
                return found
        return None
    return None if before == now else f"{key} ({before!r}, now {now!r})"


def _file_digest(path: Path) -> str:
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while chunk := file.read(WEIGHT_SAMPLE_BYTES):
                digest.update(chunk)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    return digest.hexdigest()


def _model_files(folder: Path) -> dict[str, str]:
    """Size and a digest of both ends of every file that decides a local model; of a hub name nothing."""
    if not folder.is_dir():
        return {}
    found: dict[str, str] = {}
    try:
        for path in sorted(folder.iterdir()):
            if path.suffix in (".safetensors", ".json", ".jinja", ".model", ".txt") and path.is_file():
                size = path.stat().st_size
                with path.open("rb") as file:
                    start = file.read(WEIGHT_SAMPLE_BYTES)
                    file.seek(max(0, size - WEIGHT_SAMPLE_BYTES))
                    ends = start + file.read(WEIGHT_SAMPLE_BYTES)
                found[path.name] = f"{size}:{hashlib.sha256(ends).hexdigest()[:16]}"
    except OSError as error:
        raise BraceError(f"{folder}: cannot be read: {error.strerror}") from None
    return found
