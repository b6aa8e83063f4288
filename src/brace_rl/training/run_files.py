"""What a run leaves behind: one folder, plain files, each readable while the run goes on.

==================  ========================================================================================
``config.json``     the resolved configuration
``config.toml``     the same as a recipe: ``brace train runs/NAME/config.toml`` repeats the run
``metrics.jsonl``   one JSON object per step; a figure that is not finite is null and named in "non_finite"
``samples.jsonl``   some responses of every step, with tool output marked
``rollouts.jsonl``  responses with log-probs and values per token, where ``run.rollouts_per_step`` > 0
``events/``         TensorBoard, when named in ``run.trackers``
==================  ========================================================================================

Files that hold one thing are replaced as a whole; files that grow are appended to, one line at a time, and a line that
cannot be written in full (disk full) is taken back.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import shutil
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

from brace_rl.config import Config
from brace_rl.errors import BraceError, ConfigError
from brace_rl.files import is_disk_full, write_json_atomic, write_text_atomic
from brace_rl.training.types import Trajectory

NON_FINITE = "non_finite"
"""Key of a metrics row that lists the figures which were NaN or infinite."""


class Decoder(Protocol):
    """The part of a tokenizer that samples need."""

    def decode(self, token_ids: list[int], /) -> str | list[str]: ...


class Tracker(Protocol):
    """A metric sink beside ``metrics.jsonl``."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class RunWriter:
    """Writes the files of one run; a context manager that closes its trackers.

    Args:
        directory: the run's folder; made here, its parents too.
        trackers: "tensorboard", "wandb", "trackio"; imported only when named.
        config: written to ``config.json`` and ``config.toml``.
        resume_step: None for a new run, whose folder must be empty or absent. Otherwise the step of the checkpoint the
            run goes on from: rows after it are cut, so that no step occurs twice.

    Raises:
        ConfigError: a tracker is not installed or cannot start; nothing has been written then.
        BraceError: the folder holds a run already, there is nothing to resume, or the disk is full.
    """

    def __init__(
        self, directory: Path | str, *, trackers: Sequence[str], config: Config, resume_step: int | None = None
    ) -> None:
        self.directory = Path(directory)
        check_trackers(trackers)
        self._last_step = -1 if resume_step is None else resume_step
        if resume_step is None:
            _make_new_folder(self.directory)
        elif not (self.directory / "config.json").is_file():
            raise BraceError(f"{self.directory}: no run to resume (no config.json); name the folder of a run")
        else:
            for name in ("metrics.jsonl", "samples.jsonl", "rollouts.jsonl"):
                _cut_after(self.directory / name, resume_step)
        self._trackers: dict[str, Tracker] = {}
        try:
            self._start(config.model_dump(mode="json"), trackers, resume_step)
        except BraceError:
            self.close()
            if resume_step is None:  # the folder was empty a moment ago: leave it as it was found
                shutil.rmtree(self.directory, ignore_errors=True)
            raise

    def _start(self, settings: Mapping[str, Any], trackers: Sequence[str], resume_step: int | None) -> None:
        write_json_atomic(self.directory / "config.json", settings)
        write_text_atomic(self.directory / "config.toml", to_toml(settings))
        for name in trackers:
            self._trackers[name] = _open_tracker(name, self.directory, settings, resume_step)

    def write_metrics(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Append one row and pass it to the trackers.

        Args:
            step: larger than every step before.
            metrics: name -> anything ``float()`` takes. Names are free; "a/b" groups b under a.

        Raises:
            ValueError: the step does not grow, or a figure is not a number.
            BraceError: the disk is full; the file holds only whole lines still.
        """
        if step <= self._last_step:
            raise ValueError(f"step {step} comes after step {self._last_step}; one row per step, in order")
        numbers = {name: _number(name, value) for name, value in metrics.items() if name != "step"}
        non_finite = sorted(name for name, value in numbers.items() if not math.isfinite(value))
        row: dict[str, Any] = {"step": step, **numbers, **dict.fromkeys(non_finite)}
        if non_finite:
            row[NON_FINITE] = non_finite
        _append_lines(self.directory / "metrics.jsonl", [row])
        self._last_step = step
        for name, tracker in list(self._trackers.items()):
            try:
                tracker.log(step, numbers)
            except Exception as error:  # a service that fails must not end a run whose figures are safe on disk
                del self._trackers[name]
                warnings.warn(f"{name} failed at step {step} and is left out from here on: {error}", stacklevel=2)

    def write_samples(self, samples: Iterable[Mapping[str, Any]]) -> None:
        """Append responses, as :func:`sample_record` makes them.

        Raises:
            BraceError: the disk is full; the file holds only whole lines still.
        """
        _append_lines(self.directory / "samples.jsonl", samples)

    def write_rollouts(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Append responses with their log-probs and values per token.

        Raises:
            BraceError: the disk is full; the file holds only whole lines still.
        """
        _append_lines(self.directory / "rollouts.jsonl", records)

    def close(self) -> None:
        """Flush and close the trackers. Idempotent."""
        while self._trackers:
            name, tracker = self._trackers.popitem()
            try:
                tracker.close()
            except Exception as error:  # as in write_metrics: the run itself is safe
                warnings.warn(f"{name} failed while closing: {error}", stacklevel=2)

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def sample_record(trajectory: Trajectory, tokenizer: Decoder, *, step: int) -> dict[str, Any]:
    """One line of ``samples.jsonl``.

    Returns:
        Keys: step, problem_id, request_index, sample_index, prompt (text), response (list of {"text", "policy"}, one
        per stretch of policy or inserted tokens), reward, success, truncated, turns, tokens (of the response),
        versions (run-length encoded ``[version, count]`` over the policy tokens).
    """
    marked = zip(trajectory.response_ids, trajectory.policy_mask, strict=True)
    response = [
        {"text": _decode(tokenizer, [token for token, _ in stretch]), "policy": is_policy}
        for is_policy, stretch in groupby(marked, key=lambda pair: bool(pair[1]))
    ]
    return {
        "step": step,
        "problem_id": trajectory.problem_id,
        "request_index": trajectory.request_index,
        "sample_index": trajectory.sample_index,
        "prompt": _decode(tokenizer, trajectory.prompt_ids),
        "response": response,
        "reward": trajectory.reward,
        "success": trajectory.success,
        "truncated": trajectory.truncated,
        "turns": trajectory.turns,
        "tokens": len(trajectory.response_ids),
        "versions": [[version, len(list(run))] for version, run in groupby(trajectory.policy_versions)],
    }


def to_toml(settings: Mapping[str, Mapping[str, Any]]) -> str:
    """Tables of strings, numbers, booleans and lists of these, as TOML that reads back to the same."""
    tables = []
    for section, table in settings.items():
        # TOML has no null; leaving the key out says the same.
        lines = [f"{key} = {_toml_value(value)}" for key, value in table.items() if value is not None]
        tables.append("\n".join([f"[{section}]", *lines]))
    return "\n\n".join(tables) + "\n"


def check_trackers(names: Sequence[str]) -> None:
    """Raise ConfigError, naming the package to install, for the first tracker that is not there."""
    for name in names:
        if name not in _TRACKERS:
            raise ConfigError(f"run.trackers: {name!r} is not known; use any of {', '.join(_TRACKERS)}")
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f"run.trackers: {name} is not installed; pip install {name}, or drop it from the list")


class _TensorBoard:
    def __init__(self, directory: Path, settings: Mapping[str, Any], resume_step: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge_step = None if resume_step is None else resume_step + 1
        self._writer = SummaryWriter(str(directory / "events"), purge_step=purge_step)  # type: ignore[no-untyped-call]

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        self._writer.close()  # type: ignore[no-untyped-call]


class _WandB:
    def __init__(self, directory: Path, settings: Mapping[str, Any], resume_step: int | None) -> None:
        import wandb

        # A resumed run is a second wandb run in the same group: wandb cannot take back steps it was sent.
        self._run: Any = wandb.init(
            project="brace-rl", name=directory.name, group=directory.name, dir=str(directory), config=dict(settings)
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class _Trackio:
    def __init__(self, directory: Path, settings: Mapping[str, Any], resume_step: int | None) -> None:
        import trackio

        self._trackio: Any = trackio
        resume = "never" if resume_step is None else "allow"
        trackio.init(project="brace-rl", name=directory.name, config=dict(settings), resume=resume)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._trackio.log(dict(metrics), step=step)

    def close(self) -> None:
        self._trackio.finish()


_TRACKERS: Mapping[str, Callable[[Path, Mapping[str, Any], int | None], Tracker]] = {
    "tensorboard": _TensorBoard,
    "wandb": _WandB,
    "trackio": _Trackio,
}


def _open_tracker(name: str, directory: Path, settings: Mapping[str, Any], resume_step: int | None) -> Tracker:
    try:
        return _TRACKERS[name](directory, settings, resume_step)
    except Exception as error:  # whatever a third party raises on start: no login, no network, broken install
        reason = " ".join(str(error).split())
        raise ConfigError(f"run.trackers: {name} cannot start: {reason}; mend it or drop it from the list") from error


def _make_new_folder(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        occupied = any(directory.iterdir())
    except FileExistsError:
        raise BraceError(f"{directory}: is a file; choose another run.name or run.root") from None
    except OSError as error:
        raise _cannot_write(directory, error) from None
    if occupied:
        raise BraceError(f"{directory}: is not empty; choose another run.name, or resume the run it holds")


def _cut_after(path: Path, last_step: int) -> None:
    """Keep the whole lines of steps up to ``last_step``; a half-written last line goes with the rest."""
    if not path.exists():
        return
    kept = []
    for line in path.read_bytes().split(b"\n"):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int) and row["step"] <= last_step:
            kept.append(line.decode("utf-8") + "\n")
    write_text_atomic(path, "".join(kept))


def _append_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    text = "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows)
    size = 0
    try:
        with path.open("ab") as file:
            size = file.tell()
            file.write(text.encode("utf-8", "backslashreplace"))
    except OSError as error:
        with suppress(OSError):
            os.truncate(path, size)
        raise _cannot_write(path, error) from None


def _cannot_write(path: Path, error: OSError) -> BraceError:
    if is_disk_full(error):
        return BraceError(f"{path}: no space left on the disk; free some space, then resume the run")
    return BraceError(f"{path}: cannot be written: {error.strerror}; mend the folder, then resume the run")


def _number(name: str, value: Any) -> float:
    """An int stays one; anything else goes through float()."""
    if type(value) is int:
        return value
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ValueError(f"metric {name}: {value!r} is not a number") from None


def _decode(tokenizer: Decoder, token_ids: list[int]) -> str:
    text = tokenizer.decode(token_ids)
    return text if isinstance(text, str) else "".join(text)


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return f"[{', '.join(_toml_value(item) for item in value)}]"
    if isinstance(value, str):
        # A TOML basic string is a JSON string, except that TOML wants DEL escaped too.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)
