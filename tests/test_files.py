import errno
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from brace_rl import files
from brace_rl.errors import BraceError
from brace_rl.files import atomic_directory, is_disk_full, json_text, write_json_atomic, write_text_atomic


def names(folder: Path) -> list[str]:
    return sorted(child.name for child in folder.iterdir())


def fail_with(code: int):
    def fail(*args, **kwargs):
        raise OSError(code, os.strerror(code))

    return fail


def test_text_is_written_and_replaced_and_parents_are_made(tmp_path):
    path = tmp_path / "a" / "b.txt"
    write_text_atomic(path, "one")
    write_text_atomic(path, "two — zwei\r\n")
    assert path.read_bytes().decode() == "two — zwei\r\n"
    assert names(path.parent) == ["b.txt"]


def test_a_lone_surrogate_is_written_as_its_escape(tmp_path):
    write_text_atomic(tmp_path / "a", "x\ud800y")
    assert (tmp_path / "a").read_text() == "x\\ud800y"


def test_json_round_trips_floats_to_the_last_bit(tmp_path):
    values = [0.1, 1 / 3, 5e-324, 1.7976931348623157e308, -0.0]
    write_json_atomic(tmp_path / "a.json", {"x": values})
    assert [v.hex() for v in json.loads((tmp_path / "a.json").read_text())["x"]] == [v.hex() for v in values]


def test_json_spells_non_finite_floats_so_that_float_reads_them_back():
    text = json_text({"a": [math.inf, (-math.inf, {"b": math.nan})], "c": 1.5, "d": "NaN"})
    data = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert data == {"a": ["Infinity", ["-Infinity", {"b": "NaN"}]], "c": 1.5, "d": "NaN"}
    assert float(data["a"][0]) == math.inf
    assert math.isnan(float(data["a"][1][1]["b"]))


def test_json_text_is_one_ascii_line():
    assert json_text({"text": "é\n"}) == '{"text": "\\u00e9\\n"}'


def test_what_json_cannot_hold_leaves_the_old_file(tmp_path):
    write_json_atomic(tmp_path / "a.json", 1)
    with pytest.raises(TypeError):
        write_json_atomic(tmp_path / "a.json", {"x": object()})
    assert (tmp_path / "a.json").read_text() == "1\n"


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, code):
    path = tmp_path / "a.txt"
    write_text_atomic(path, "old")
    monkeypatch.setattr(files.os, "fsync", fail_with(code))
    with pytest.raises(BraceError, match=r"a\.txt: no space left on the disk") as caught:
        write_text_atomic(path, "new")
    assert "\n" not in str(caught.value)
    assert path.read_text() == "old"
    assert names(tmp_path) == ["a.txt"]


def test_a_path_that_cannot_be_written_is_a_brace_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BraceError, match="cannot be written"):
        write_text_atomic(tmp_path / "file" / "below.txt", "x")
    with pytest.raises(BraceError, match="cannot be written"), atomic_directory(tmp_path / "file" / "below"):
        pass
    with (
        pytest.raises(BraceError, match="file: cannot be written: Not a directory"),
        atomic_directory(tmp_path / "file"),
    ):
        pass
    assert names(tmp_path) == ["file"]


def test_a_directory_appears_whole_when_the_block_ends(tmp_path):
    path = tmp_path / "a" / "model"
    with atomic_directory(path) as folder:
        (folder / "sub").mkdir()
        (folder / "sub" / "x").write_text("1")
        assert not path.exists()
        assert folder.parent == path.parent
    assert (path / "sub" / "x").read_text() == "1"
    assert names(path.parent) == ["model"]


def test_a_directory_is_replaced_as_a_whole(tmp_path):
    for name in ("old", "new"):
        with atomic_directory(tmp_path / "d") as folder:
            (folder / name).write_text(name)
    assert names(tmp_path / "d") == ["new"]
    assert names(tmp_path) == ["d"]


def test_an_error_in_the_block_passes_through_and_leaves_the_old_directory(tmp_path):
    with atomic_directory(tmp_path / "d") as folder:
        (folder / "old").write_text("")
    with pytest.raises(FileNotFoundError), atomic_directory(tmp_path / "d") as folder:
        shutil.copy(tmp_path / "missing", folder / "new")
    assert names(tmp_path / "d") == ["old"]
    assert names(tmp_path) == ["d"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_disk_that_fills_up_in_the_block_is_a_brace_error(tmp_path):
    with pytest.raises(BraceError, match="d: no space left on the disk"), atomic_directory(tmp_path / "d"):
        Path("/dev/full").write_text("1")
    assert names(tmp_path) == []


def test_a_disk_full_error_is_recognised_inside_a_library_error():
    assert is_disk_full(RuntimeError("I/O error: No space left on device (os error 28)"))
    assert is_disk_full(OSError(errno.ENOSPC, "whatever"))
    assert not is_disk_full(OSError(errno.EACCES, "No space left on device"))
    assert not is_disk_full(ValueError("no space in this text"))


def test_a_failed_rename_puts_the_old_directory_back(tmp_path, monkeypatch):
    with atomic_directory(tmp_path / "d") as folder:
        (folder / "old").write_text("")
    rename, calls = os.rename, []

    def second_fails(source, target):
        calls.append(target)
        if len(calls) == 2:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        rename(source, target)

    monkeypatch.setattr(files.os, "rename", second_fails)
    with pytest.raises(BraceError, match="Input/output error"), atomic_directory(tmp_path / "d"):
        pass
    assert names(tmp_path / "d") == ["old"]
    assert names(tmp_path) == ["d"]


def test_a_process_killed_in_the_block_leaves_the_old_directory(tmp_path):
    with atomic_directory(tmp_path / "d") as folder:
        (folder / "old").write_text("")
    script = (
        "import os, sys; from brace_rl.files import atomic_directory\n"
        "with atomic_directory(sys.argv[1]) as folder:\n"
        "    (folder / 'new').write_text('half')\n"
        "    os._exit(9)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path / "d")], timeout=60, env=_environment())
    assert done.returncode == 9
    assert names(tmp_path / "d") == ["old"]
    assert all(name == "d" or name.endswith(files.TEMPORARY_SUFFIX) for name in names(tmp_path))


def test_a_process_killed_between_the_two_renames_loses_nothing(tmp_path):
    (tmp_path / ".d.old").mkdir()
    (tmp_path / ".d.old" / "old").write_text("")
    with pytest.raises(ZeroDivisionError), atomic_directory(tmp_path / "d"):
        raise ZeroDivisionError
    assert names(tmp_path / "d") == ["old"]
    assert names(tmp_path) == ["d"]


def test_the_current_folder_can_be_written(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with atomic_directory(".") as folder:
        (folder / "x").write_text("1")
    assert (tmp_path / "here" / "x").read_text() == "1"


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
