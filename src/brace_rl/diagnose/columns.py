"""Names of the columns, and how they are found in a file that calls them differently."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from brace_rl.errors import DataError

TOKEN_NUMBERS = ("behavior_logprobs", "target_logprobs", "values")
"""Per-token columns of numbers; a file needs one of them at least."""

TOKEN_COLUMNS = (*TOKEN_NUMBERS, "rewards", "policy_mask", "versions", "token_ids")
"""Columns with one entry per response token; ``versions`` may be one number for the whole response."""

RESPONSE_COLUMNS = ("reward", "current_version", "prompt_id", "truncated", "bootstrap")
"""Columns with one entry per response."""

COLUMNS = (*TOKEN_COLUMNS, *RESPONSE_COLUMNS)

BUILT_IN_MAPS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "verl": MappingProxyType(
            {
                "behavior_logprobs": "rollout_log_probs",
                "target_logprobs": "old_log_probs",
                "values": "values",
                "rewards": "rm_scores",
                "policy_mask": "response_mask",
                "token_ids": "responses",
                "reward": "score",
                "prompt_id": "uid",
            }
        )
    }
)
"""``--map NAME``: the columns of a batch as a framework names them; columns a file lacks are skipped."""

TELLTALES: Mapping[str, str] = MappingProxyType(
    {"rollout_log_probs": "verl", "old_log_probs": "verl", "response_mask": "verl"}
)
"""Columns that show which built-in map a file needs: names that it reads and nobody else writes."""

EVERY = "*"
"""Path component that stands for all entries of a list."""


class _Absent:
    """Stands for a column that is not there; ``None`` is something a file can hold."""


ABSENT = _Absent()


class ColumnMap:
    """Where our columns are in a file.

    Args:
        paths: our name -> their name, or a dotted path: keys of nested objects, numbers for entries of a list (-1 the
            last), ``*`` for all entries, whose lists are put end to end and whose entries without the rest of the path
            are skipped. A column not named is looked up under our own name.
        required: our names that must be there, because the user asked for them.
    """

    def __init__(self, paths: Mapping[str, str] | None = None, *, required: Sequence[str] = ()) -> None:
        self.paths = {name: name for name in COLUMNS} | dict(paths or {})
        self.required = tuple(required)

    def label(self, column: str) -> str:
        """Our name, with theirs where it differs; for messages."""
        theirs = self.paths[column]
        return column if theirs == column else f"{column} (mapped from {theirs})"

    def roots(self) -> set[str]:
        """Top-level names that any path may start with."""
        of_paths = (path.split(".")[0] for path in self.paths.values())
        return {*self.paths.values(), *of_paths, *TELLTALES, *TOKEN_NUMBERS}

    def find(self, row: Mapping[str, Any], column: str) -> Any:
        """The entry of ``column`` in ``row``; :data:`ABSENT` when it is not there, or null."""
        path = self.paths[column]
        found = row[path] if path in row else _walk(row, path.split("."))
        return ABSENT if found is None else found


def parse_maps(words: Sequence[str]) -> ColumnMap:
    """From ``--map`` options: ``ours=theirs``, the name of a built-in map, or a JSON file of such pairs; the last wins.

    Raises:
        DataError: no such column of ours, no such map, or a file that is not an object of texts.
    """
    paths: dict[str, str] = {}
    required: set[str] = set()
    for word in words:
        ours, equals, theirs = word.partition("=")
        if equals:
            pairs = {ours.strip(): theirs.strip()}
        elif word in BUILT_IN_MAPS:
            paths |= BUILT_IN_MAPS[word]
            continue
        else:
            pairs = _read_map(Path(word))
        for name, path in pairs.items():
            if name not in COLUMNS:
                raise DataError(f"--map {word}: {name!r} is not a column of ours; those are {', '.join(COLUMNS)}")
            if not path:
                raise DataError(f"--map {word}: names no column of the file; write {name}=THEIR_NAME")
        paths |= pairs
        required |= set(pairs)
    return ColumnMap(paths, required=[name for name in COLUMNS if name in required])


def _read_map(path: Path) -> dict[str, str]:
    try:
        pairs = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        known = ", ".join(BUILT_IN_MAPS)
        raise DataError(
            f"--map {path}: not understood; write ours=theirs, the name of a built-in map ({known}) or a JSON file"
        ) from None
    except RecursionError:
        raise DataError(f"--map {path}: nested too deeply; expected an object of texts") from None
    except ValueError as error:
        raise DataError(f"--map {path}: not valid JSON: {error}") from None
    if not isinstance(pairs, dict) or not all(isinstance(theirs, str) for theirs in pairs.values()):
        raise DataError(f'--map {path}: expected an object of texts, such as {{"values": "critic.values"}}')
    return pairs


def _walk(node: Any, path: Sequence[str]) -> Any:
    for depth, key in enumerate(path):
        if isinstance(node, Mapping):
            if key not in node:
                return ABSENT
            node = node[key]
        elif isinstance(node, list) and key == EVERY:
            return _gather(node, path[depth + 1 :])
        elif isinstance(node, list) and key.removeprefix("-").isdigit():
            index = int(key)
            if not -len(node) <= index < len(node):
                return ABSENT
            node = node[index]
        else:
            return ABSENT
    return node


def _gather(nodes: Sequence[Any], path: Sequence[str]) -> Any:
    gathered: list[Any] = []
    for node in nodes:
        found = _walk(node, path)
        if isinstance(found, _Absent) or found is None:
            continue
        if isinstance(found, list):
            gathered += found
        else:
            gathered.append(found)
    return gathered or ABSENT
