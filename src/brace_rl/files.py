"""Writing files so that a reader sees the old content or the new, never half of either. Standard library only."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from brace_rl.errors import BraceError

TEMPORARY_SUFFIX = ".tmp"
"""Ends the (hidden) name of everything that is not in place yet; a killed process may leave such names behind."""


def json_text(obj: Any, *, indent: int | None = None) -> str:
    """``obj`` as strict JSON, ASCII only; one line unless ``indent`` is given.

    JSON has no NaN or infinity: they are written as the strings "NaN", "Infinity" and "-Infinity". Python's ``float()``
    and JavaScript's ``Number()`` read these back, and no reader can take them for a number they are not (``null``
    would become 0 in JavaScript).

    Raises:
        TypeError: ``obj`` holds something JSON has no word for.
    """
    try:
        return json.dumps(obj, indent=indent, allow_nan=False)
    except ValueError:
        return json.dumps(_spell_non_finite(obj), indent=indent, allow_nan=False)


def write_text_atomic(path: str | Path, text: str) -> None:
    """Write ``text`` as UTF-8 to ``path``, as :func:`write_bytes_atomic` does.

    A lone surrogate, which UTF-8 cannot hold, is written as its escape.
    """
    write_bytes_atomic(path, text.encode("utf-8", errors="backslashreplace"))


def write_bytes_atomic(path: str | Path, content: bytes) -> None:
    """Write ``content`` to ``path``, making parent folders; an existing file is replaced in one step.

    Raises:
        BraceError: the path cannot be written, a full disk included; what was there before is untouched.
    """
    path = Path(path)
    temporary = _temporary_sibling(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync(path.parent)
    except OSError as error:
        raise _cannot_write(path, error) from error
    finally:
        with suppress(OSError):  # usually not there any more
            temporary.unlink()


def write_json_atomic(path: str | Path, obj: Any) -> None:
    """Write ``obj`` as indented JSON (see :func:`json_text` for NaN and infinity), replacing ``path`` in one step.

    Raises:
        BraceError: as :func:`write_text_atomic`.
        TypeError: as :func:`json_text`; nothing is written.
    """
    write_text_atomic(path, json_text(obj, indent=2) + "\n")


@contextmanager
def atomic_directory(path: str | Path) -> Iterator[Path]:
    """Fill a folder out of sight and move it to ``path`` when the block ends without an error.

    Yields an empty temporary folder beside ``path`` (on the same disk, so that the move is a rename). At the end all of
    it is flushed to the disk and renamed. An existing folder is first moved to ``.NAME.old`` and deleted last; a
    process killed between the two renames leaves only that copy, and the next call for the same path puts it back. If
    the block raises, the temporary folder is deleted and ``path`` stays as it was. One writer per path is assumed.

    Raises:
        BraceError: the disk is full (raised in the block by whatever library), or ``path`` cannot be written.
    """
    path = Path(os.path.abspath(path))  # "." and ".." have no sibling names
    temporary, previous = _temporary_sibling(path), path.with_name(f".{path.name}.old")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _settle_previous(path, previous)
        temporary.mkdir()
    except OSError as error:
        raise _cannot_write(path, error) from error
    try:
        yield temporary
        _move_into_place(temporary, path, previous)
    except Exception as error:
        if is_disk_full(error):
            raise _cannot_write(path, error) from error
        raise
    finally:
        # The block's own error matters more than a failure to clean up after it.
        shutil.rmtree(temporary, ignore_errors=True)


def is_disk_full(error: BaseException) -> bool:
    """Whether ``error`` says that a disk or quota is full, also when a library wrapped the operating system's error."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return any(os.strerror(code) in str(error) for code in (errno.ENOSPC, errno.EDQUOT))


def _move_into_place(temporary: Path, path: Path, previous: Path) -> None:
    try:
        for folder, _, names in os.walk(temporary):
            for name in names:
                _sync(Path(folder, name))
            _sync(Path(folder))
        replaces = path.exists()
        if replaces:
            os.rename(path, previous)
        try:
            os.rename(temporary, path)
        except OSError:
            if replaces:
                os.rename(previous, path)
            raise
        _sync(path.parent)
    except OSError as error:
        raise _cannot_write(path, error) from error
    shutil.rmtree(previous, ignore_errors=True)


def _settle_previous(path: Path, previous: Path) -> None:
    """Finish what a killed replacement left: put the old folder back if nothing took its place, else delete it."""
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    if previous.exists():
        if path.exists():
            shutil.rmtree(previous)
        else:
            os.rename(previous, path)


def _temporary_sibling(path: Path) -> Path:
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}{TEMPORARY_SUFFIX}")


def _sync(path: Path) -> None:
    """Flush a file, or a folder's list of names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems cannot sync a folder
            raise
    finally:
        os.close(descriptor)


def _cannot_write(path: Path, error: BaseException) -> BraceError:
    if is_disk_full(error):
        return BraceError(f"{path}: no space left on the disk; free some space and run again")
    reason = error.strerror if isinstance(error, OSError) and error.strerror else error
    return BraceError(f"{path}: cannot be written: {reason}")


def _spell_non_finite(obj: Any) -> Any:
    if isinstance(obj, float) and not math.isfinite(obj):
        return "NaN" if math.isnan(obj) else "Infinity" if obj > 0 else "-Infinity"
    if isinstance(obj, dict):
        return {key: _spell_non_finite(value) for key, value in obj.items()}
    if isinstance(obj, (list, tuple)):
        return [_spell_non_finite(value) for value in obj]
    return obj
