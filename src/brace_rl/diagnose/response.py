"""One logged response, and the checks that turn a row of a file into one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from brace_rl.diagnose.columns import (
    ABSENT,
    BUILT_IN_MAPS,
    RESPONSE_COLUMNS,
    TELLTALES,
    TOKEN_COLUMNS,
    TOKEN_NUMBERS,
    ColumnMap,
)
from brace_rl.errors import DataError

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

NO_VERSION = -1
"""Entry of ``versions`` where nothing is known; so our trainer marks tokens the policy did not sample."""

_LARGEST_INT = 2.0**53
NOT_FINITE_WORDS = ("NaN", "Infinity", "-Infinity")
"""Texts that stand for numbers, for which JSON has no word of its own."""
_SHOWN = 40
"""Characters of a wrong entry that a message repeats."""


@dataclass(frozen=True)
class Response:
    """What a row says; every array is ``[T]`` over response tokens, tool output included.

    Attributes:
        where: file and row, for messages.
        columns: our names of what the row holds.
        policy_mask: True where the policy sampled the token; all True when the file does not say.
        behavior_logprobs, target_logprobs, values: NaN where the file has null or NaN. ``values[t]`` is V before token
            ``t``.
        rewards: a scalar reward stands at the last policy token.
        versions: :data:`NO_VERSION` where unknown.
        one_version: the file gives one version for the whole response.
        bootstrap: value after the last token; 0 when the file does not say.
    """

    where: str
    columns: frozenset[str]
    policy_mask: Bools
    behavior_logprobs: Floats | None = None
    target_logprobs: Floats | None = None
    values: Floats | None = None
    rewards: Floats | None = None
    token_ids: Ints | None = None
    versions: Ints | None = None
    one_version: bool = False
    current_version: int | None = None
    prompt_id: str | None = None
    truncated: bool = False
    bootstrap: float = 0.0

    def __len__(self) -> int:
        return len(self.policy_mask)

    @property
    def numbers(self) -> dict[str, Floats]:
        """The per-token numbers it has, by name."""
        found = {name: getattr(self, name) for name in TOKEN_NUMBERS}
        return {name: x for name, x in found.items() if x is not None}


class RowError(DataError):
    """A row cannot be used; the message names file, row, column, and what was expected."""


def response_from_row(row: Mapping[str, Any], names: ColumnMap, where: str) -> Response:
    """Check a row.

    Args:
        row: column name -> list, array or number.
        where: file and row.

    Raises:
        RowError: a column is missing or not what it should be.
    """
    found = {name: names.find(row, name) for name in (*TOKEN_COLUMNS, *RESPONSE_COLUMNS)}
    found = {name: entry for name, entry in found.items() if entry is not ABSENT}
    for name in names.required:
        if name not in found:
            have = ", ".join(sorted(map(str, row))) or "none"
            raise RowError(f"{where}: {names.label(name)}: not there; columns of the row: {have}")
    present = [name for name in TOKEN_NUMBERS if name in found]
    _check_names(row, names, found, where)
    if not present:
        raise RowError(_nothing_to_read(row, where))
    check = _Checks(where, names)
    arrays = {name: check.floats(name, found[name]) for name in present}
    length = len(arrays[present[0]])
    mask = check.mask(found["policy_mask"]) if "policy_mask" in found else np.ones(length, dtype=bool)
    versions, one_version = check.versions(found["versions"], length) if "versions" in found else (None, False)
    token_ids = check.ints("token_ids", found["token_ids"]) if "token_ids" in found else None
    rewards = check.rewards(found, mask)
    for name, x in {**arrays, "policy_mask": mask, "versions": versions, "token_ids": token_ids}.items():
        if x is not None:
            check.length(name, x, present[0], length)
    if "rewards" in found and rewards is not None:
        check.length("rewards", rewards, present[0], length)
    return Response(
        where=where,
        columns=frozenset(found),
        policy_mask=mask,
        rewards=rewards,
        token_ids=token_ids,
        versions=versions,
        one_version=one_version,
        current_version=check.whole("current_version", found["current_version"])
        if "current_version" in found
        else None,
        prompt_id=check.text("prompt_id", found["prompt_id"]) if "prompt_id" in found else None,
        truncated=check.flag("truncated", found["truncated"]) if "truncated" in found else False,
        bootstrap=check.number("bootstrap", found["bootstrap"]) if "bootstrap" in found else 0.0,
        **arrays,
    )


def _check_names(row: Mapping[str, Any], names: ColumnMap, found: Mapping[str, Any], where: str) -> None:
    """Refuse a row in which columns go unread because the names of another layout were asked for."""
    for telltale, built_in in TELLTALES.items():
        ours = next(name for name, theirs in BUILT_IN_MAPS[built_in].items() if theirs == telltale)
        if row.get(telltale) is not None and ours not in found and telltale not in names.paths.values():
            raise RowError(
                f"{where}: {ours}: not there, but {telltale} is, as {built_in} calls it; add --map {built_in}, or "
                f"--map {ours}={telltale}"
            )
    for name in TOKEN_NUMBERS:
        if row.get(name) is not None and name not in found:
            raise RowError(
                f"{where}: {names.label(name)}: not there, but {name} itself is; leave out the --map that renames it"
            )


def _nothing_to_read(row: Mapping[str, Any], where: str) -> str:
    wanted = ", ".join(TOKEN_NUMBERS)
    have = ", ".join(sorted(map(str, row))) or "none"
    if "output" in row and "score" in row:
        mend = "a dump of texts and scores holds no per-token numbers: log rollout_log_probs, old_log_probs and values"
    else:
        mend = "name them with --map ours=theirs"
    return f"{where}: expected at least one of the columns {wanted}, found {have}; {mend}"


def _is_number(entry: object) -> bool:
    """Also null and :data:`NOT_FINITE_WORDS`; not an integer beyond every float."""
    if entry is None or (isinstance(entry, str) and entry in NOT_FINITE_WORDS):
        return True
    if not isinstance(entry, int | float | np.number | np.bool_):
        return False
    try:
        float(entry)
    except OverflowError:
        return False
    return True


class _Checks:
    """Conversions of one row's entries; every one says row, column and expectation when it fails."""

    def __init__(self, where: str, names: ColumnMap) -> None:
        self.where, self.names = where, names

    def wrong(self, column: str, expected: str, found: object) -> RowError:
        shown = repr(found)
        shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."
        return RowError(f"{self.where}: {self.names.label(column)}: expected {expected}, found {shown}")

    def floats(self, column: str, entry: Any) -> Floats:
        if not isinstance(entry, list | np.ndarray):
            raise self.wrong(column, "a list of numbers, one per response token", entry)
        try:
            array = np.asarray(entry, dtype=np.float64)  # null becomes NaN
        except (TypeError, ValueError, OverflowError):
            array = None
        is_plain = isinstance(entry, np.ndarray) and entry.dtype.kind in "fiub"
        # numpy reads any text that looks like a number
        has_text = not is_plain and any(issubclass(kind, str) for kind in set(map(type, entry)))
        if array is None or array.ndim != 1 or has_text:
            for i, x in enumerate(entry):
                if not _is_number(x):
                    raise self.wrong(column, f"a number at position {i}", x)
            if array is None or array.ndim != 1:
                raise self.wrong(column, "a flat list of numbers", entry)
        return array

    def ints(self, column: str, entry: Any) -> Ints:
        array = self.floats(column, entry)
        array = np.where(np.isnan(array), NO_VERSION, array)
        odd = (array != np.floor(array)) | (np.abs(array) > _LARGEST_INT)
        if odd.any():
            i = int(np.argmax(odd))
            raise self.wrong(column, f"a whole number at position {i}", float(array[i]))
        return array.astype(np.int64)

    def mask(self, entry: Any) -> Bools:
        array = self.floats("policy_mask", entry)
        odd = (array != 0) & (array != 1)
        if odd.any():
            i = int(np.argmax(odd))
            raise self.wrong("policy_mask", f"true or false (1 or 0) at position {i}", float(array[i]))
        return array.astype(bool)

    def versions(self, entry: Any, length: int) -> tuple[Ints, bool]:
        if isinstance(entry, list | np.ndarray):
            return self.ints("versions", entry), False
        return np.full(length, self.whole("versions", entry), dtype=np.int64), True

    def rewards(self, found: Mapping[str, Any], mask: Bools) -> Floats | None:
        """Per token; ``rewards`` wins over ``reward``, which goes to the last policy token."""
        if "rewards" in found:
            rewards = self.floats("rewards", found["rewards"])
            odd = ~np.isfinite(rewards)
            if odd.any():
                i = int(np.argmax(odd))
                raise self.wrong("rewards", f"a finite number at position {i} (0 for none)", float(rewards[i]))
            return rewards
        if "reward" not in found:
            return None
        reward = self.number("reward", found["reward"])
        rewards = np.zeros(len(mask))
        if mask.any():
            rewards[np.flatnonzero(mask)[-1]] = reward
        return rewards

    def number(self, column: str, entry: Any) -> float:
        if isinstance(entry, bool | np.bool_):
            return float(entry)
        if not isinstance(entry, int | float | np.number) or not _is_number(entry) or not math.isfinite(float(entry)):
            raise self.wrong(column, "a finite number", entry)
        return float(entry)

    def whole(self, column: str, entry: Any) -> int:
        x = self.number(column, entry)
        if isinstance(entry, bool) or x != int(x) or abs(x) > _LARGEST_INT:
            raise self.wrong(column, "a whole number", entry)
        return int(x)

    def flag(self, column: str, entry: Any) -> bool:
        if not isinstance(entry, bool | int | float | np.bool_ | np.number) or entry not in (0, 1):
            raise self.wrong(column, "true or false", entry)
        return bool(entry)

    def text(self, column: str, entry: Any) -> str:
        if not isinstance(entry, str | int | np.integer):
            raise self.wrong(column, "a text or a whole number", entry)
        return str(entry)

    def length(self, column: str, x: Floats | Ints | Bools, reference: str, length: int) -> None:
        if len(x) != length:
            raise self.wrong(column, f"{length} entries, as many as {self.names.label(reference)} has", len(x))
