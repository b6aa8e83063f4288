"""Python a model wrote: what it prints comes back, and nothing else happens. Attacks run for real."""

from __future__ import annotations

import asyncio
import pickle
import sys
import time
from pathlib import Path

import pytest

from brace_rl.errors import ConfigError
from brace_rl.tasks.python_tool import Limits, Outcome, PythonTool, check_isolation, run_python, runner
from brace_rl.tasks.python_tool.child import seccomp_program
from brace_rl.tasks.tools import Block, ToolError, ToolFigures, run_calls

LIMITS = Limits(wall_s=60.0, cpu_s=20)
BRIEF = Limits(wall_s=1.5, cpu_s=20)


def isolation_works() -> bool:
    try:
        check_isolation(LIMITS)
    except ConfigError:
        return False
    return True


needs_isolation = pytest.mark.skipif(
    sys.platform != "linux" or not isolation_works(), reason="this machine does not permit unprivileged namespaces"
)


def call(code: str, limits: Limits = LIMITS) -> str:
    return asyncio.run(PythonTool(limits).call(code))


def refusal(code: str, limits: Limits = LIMITS) -> str:
    with pytest.raises(ToolError) as caught:
        call(code, limits)
    return str(caught.value)


def processes_marked(mark: str) -> list[str]:
    """Command lines of live processes that hold ``mark``; forks share their parent's."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_bytes()
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            continue
        if mark.encode() in line and state != "Z":
            found.append(line.decode(errors="replace"))
    return found


def assert_gone(mark: str) -> None:
    """The kernel clears a namespace a moment after its first process was killed."""
    for _ in range(200):
        if not processes_marked(mark):
            return
        time.sleep(0.05)
    assert processes_marked(mark) == []


@needs_isolation
def test_what_a_script_prints_is_the_observation() -> None:
    code = "import math, fractions\nprint(math.comb(10, 3))\nprint(fractions.Fraction(1, 3) + 1)"
    assert call(code) == "120\n4/3"


@needs_isolation
def test_a_script_that_prints_nothing_says_so() -> None:
    assert call("x = 1") == "(no output)"


@needs_isolation
@pytest.mark.parametrize(
    ("code", "observation"),
    [
        ("1/0", "ZeroDivisionError: division by zero\nerror: exit status 1"),
        ("x = = 1", "SyntaxError: invalid syntax\nerror: exit status 1"),
        ("print('a')\nimport sys; sys.exit(3)", "a\nerror: exit status 3"),
        ("input()", "EOFError: EOF when reading a line\nerror: exit status 1"),
        ("import numpy", "ModuleNotFoundError: No module named 'numpy'\nerror: exit status 1"),
    ],
)
def test_a_script_that_fails_is_explained_by_its_own_frames_alone(code: str, observation: str) -> None:
    text = refusal(code)
    assert text.endswith(observation)
    assert "child.py" not in text
    assert "runpy" not in text


@needs_isolation
def test_an_endless_loop_ends_at_the_cpu_limit() -> None:
    limits = Limits(wall_s=60.0, cpu_s=1)
    assert refusal("while True: pass", limits) == "error: stopped after 1 s of CPU time"


@needs_isolation
def test_a_sleeper_ends_at_the_wall_limit_and_its_output_is_kept() -> None:
    code = "import time\nprint('started', flush=True)\ntime.sleep(600)"
    assert refusal(code, BRIEF) in ("started\nerror: stopped after 1.5 s", "error: stopped after 1.5 s")


@needs_isolation
@pytest.mark.parametrize("code", ["x = bytearray(2 << 30)", "x = []\nwhile True: x.append(bytearray(16 << 20))"])
def test_a_memory_balloon_bursts_inside(code: str) -> None:
    assert "MemoryError" in refusal(code)


@needs_isolation
def test_a_flood_of_output_is_stopped_and_cut() -> None:
    text = refusal("while True: print('x' * 1000)")
    assert text.endswith("error: stopped, more than 10000 bytes of output")
    assert len(text) < 10_100


@needs_isolation
def test_a_fork_bomb_makes_few_processes_and_leaves_none() -> None:
    code = (
        "import os, time\nmade = 0\ntry:\n    while True:\n        if os.fork() == 0:\n            time.sleep(600)\n"
        "        made += 1\nexcept OSError:\n    print(made)"
    )
    limits = Limits(wall_s=60.125, processes=3)
    assert call(code, limits) == "3"
    assert_gone("60.125")


@needs_isolation
def test_a_relentless_fork_bomb_is_killed_whole() -> None:
    code = "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass"
    assert refusal(code, Limits(wall_s=1.625)) == "error: stopped after 1.625 s"
    assert_gone("1.625")


@needs_isolation
def test_a_process_left_in_the_background_is_killed_with_its_call() -> None:
    code = (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        time.sleep(600)\n"
        "    os._exit(0)\nprint('done')"
    )
    assert call(code, Limits(wall_s=60.375)) == "done"
    assert_gone("60.375")


@needs_isolation
@pytest.mark.parametrize("path", ["/etc/passwd", "/proc/self/status", str(Path(__file__).resolve()), "/dev/sda"])
def test_files_of_the_machine_do_not_exist(path: str) -> None:
    assert "FileNotFoundError" in refusal(f"open({path!r})")


@needs_isolation
def test_a_file_everyone_may_read_is_still_out_of_reach(tmp_path: Path) -> None:
    secret = Path("/tmp") / f"brace-secret-{tmp_path.name}"
    secret.write_text("secret")
    secret.chmod(0o666)
    try:
        assert "FileNotFoundError" in refusal(f"print(open({str(secret)!r}).read())")
        code = f"open({str(secret)!r}, 'w').write('changed')"
        assert "No such file" in refusal(code)
        assert secret.read_text() == "secret"
    finally:
        secret.unlink()


@needs_isolation
def test_libraries_cannot_be_written() -> None:
    assert "Error" in refusal("import os; open(os.__file__, 'a')")


@needs_isolation
def test_its_own_folder_can_be_written_and_is_small() -> None:
    assert call("open('a', 'w').write('hello')\nprint(open('a').read())") == "hello"
    assert "No space left" in refusal("for i in range(64): open(str(i), 'wb').write(bytes(1 << 20))")
    assert "FileNotFoundError" in refusal("open('a')")  # the next call starts afresh


@needs_isolation
@pytest.mark.parametrize("family", ["AF_INET", "AF_INET6", "AF_UNIX", "AF_NETLINK", "AF_VSOCK"])
def test_no_socket_of_any_family_opens(family: str) -> None:
    assert "Operation not permitted" in refusal(f"import socket; socket.socket(socket.{family})")


@needs_isolation
@pytest.mark.parametrize(
    "attempt",
    [
        "c.unshare(0x10000000)",
        "c.mount(b'x', b'/', b'tmpfs', 0, None)",
        "c.syscall(425, 1, 0)",
        "c.ptrace(16, 1, 0, 0)",
        "c.shmget(0, 4096, 0o1600)",
        "c.msgget(0, 0o1600)",
        "c.semget(0, 1, 0o1600)",
        "c.memfd_create(b'x', 0)",
    ],
)
def test_calls_that_could_undo_the_isolation_or_hold_uncounted_memory_are_refused(attempt: str) -> None:
    code = f"import ctypes\nc = ctypes.CDLL(None, use_errno=True)\nprint({attempt}, ctypes.get_errno())"
    assert call(code) == "-1 1"


@needs_isolation
def test_the_first_process_of_its_namespace_cannot_be_killed_from_inside() -> None:
    code = "import os\ntry:\n    os.kill(1, 9)\nexcept PermissionError:\n    pass\nprint('alive')"
    assert call(code) == "alive"


@needs_isolation
def test_the_environment_of_the_trainer_is_not_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "abc")
    assert call("import os; print(os.environ.get('SECRET_TOKEN'), len(os.environ) < 6)") == "None True"


@needs_isolation
def test_several_scripts_of_one_turn_run_at_once_and_a_slow_one_is_an_observation() -> None:
    calls = [Block("python", f"print({number})") for number in (1, 2)] + [
        Block("python", "import time; time.sleep(600)")
    ]
    figures = ToolFigures()
    tools = {"python": PythonTool(Limits(wall_s=8.0))}
    results = asyncio.run(run_calls(calls, tools, figures=figures, timeout_s=60.0))
    assert results == ["1", "2", "error: stopped after 8 s"]
    assert (figures.calls, figures.errors) == (3, 1)


def test_code_too_long_is_refused_without_a_process() -> None:
    assert refusal("#" * 20_001) == "error: the code is longer than 20000 characters"


def test_without_isolation_limits_still_hold() -> None:
    limits = Limits(wall_s=60.0, isolated=False)
    assert call("print(6 * 7)", limits) == "42"
    assert "MemoryError" in refusal("x = bytearray(2 << 30)", limits)


@pytest.mark.parametrize("isolated", [pytest.param(True, marks=needs_isolation), False])
def test_code_that_closes_its_output_and_stays_is_stopped_too(isolated: bool) -> None:
    code = "import os, time\nos.close(1)\nos.close(2)\ntime.sleep(600)"
    assert refusal(code, Limits(wall_s=1.5, isolated=isolated)) == "error: stopped after 1.5 s"


def test_a_machine_that_refuses_isolation_is_a_clear_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    child = tmp_path / "child.py"
    child.write_text("import os, sys\nos.write(int(sys.argv[2]), b'unshare: Operation not permitted')\n")
    monkeypatch.setattr(runner, "CHILD", child)
    with pytest.raises(ConfigError, match=r"task\.python_tool: .*unshare: Operation not permitted.*python_isolation"):
        check_isolation(LIMITS)


def test_the_tool_survives_pickling() -> None:
    assert pickle.loads(pickle.dumps(PythonTool(BRIEF))) == PythonTool(BRIEF)


def test_an_outcome_names_the_signal_that_ended_a_process() -> None:
    limits = Limits(wall_s=60.0, isolated=False)
    outcome = run_python("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", limits)
    assert outcome == Outcome(output="", ended="exit", status=128 + 11)


def test_every_jump_of_the_filter_lands_in_it() -> None:
    program = seccomp_program(0xC000003E, list(range(100, 130)))
    lines = [program[place : place + 8] for place in range(0, len(program), 8)]
    for place, line in enumerate(lines):
        assert place + 1 + max(line[2], line[3]) <= len(lines)
        if line[0] == 0x15 and place > 4:
            assert lines[place + 1 + line[2]] == lines[-1]  # a match is refused
