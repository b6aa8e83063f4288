"""The progress display: plain lines off a terminal, a panel on one."""

from __future__ import annotations

import io
import math

import pytest

from brace_rl.training.progress import Progress, sparkline


class Clock:
    """Time that moves only when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def plain_lines(steps: int, every_s: float, seconds_per_step: float, completed: int = 0) -> list[str]:
    stream, clock = io.StringIO(), Clock()
    with Progress(stream=stream, every_s=every_s, clock=clock) as progress:
        progress.start(steps, completed)
        for step in range(completed + 1, steps + 1):
            clock.now += seconds_per_step
            progress.step({"step": step, "reward/mean": 0.5, "throughput/tokens_per_s": 1234.5})
    return stream.getvalue().splitlines()


def test_off_a_terminal_a_step_is_one_line_without_control_codes():
    lines = plain_lines(steps=3, every_s=0, seconds_per_step=1)
    assert lines[0] == "step 1/3  reward 0.500  tokens/s 1,234  left 0:02"
    assert lines[2] == "step 3/3  reward 0.500  tokens/s 1,234"
    assert len(lines) == 3
    assert all(line.isprintable() for line in lines)


def test_plain_lines_keep_their_distance_but_the_first_and_the_last_are_shown():
    lines = plain_lines(steps=10, every_s=4, seconds_per_step=1)
    assert [line.split()[1] for line in lines] == ["1/10", "5/10", "9/10", "10/10"]


def test_a_step_that_evaluates_is_always_shown():
    stream = io.StringIO()
    progress = Progress(stream=stream, every_s=100, clock=Clock())
    progress.start(10)
    progress.step({"step": 0, "eval/success": 0.25})
    progress.step({"step": 1, "reward/mean": 0.5})
    progress.step({"step": 2, "reward/mean": 0.5})
    progress.step({"step": 3, "eval/success": 0.5})
    shown = [line.split("  ")[:2] for line in stream.getvalue().splitlines()]
    assert shown == [
        ["before training:", "success 25.0%"],
        ["step 1/10", "reward 0.500"],
        ["step 3/10", "success 50.0%"],
    ]


def test_time_left_counts_only_the_steps_this_process_did():
    lines = plain_lines(steps=20, every_s=0, seconds_per_step=60, completed=10)
    assert lines[0].endswith("left 9:00")


def test_messages_lose_their_control_codes_and_keep_their_brackets():
    stream = io.StringIO()
    Progress(stream=stream).message("saved [red]here[/red]\x1b[2J\r\nnext")
    assert stream.getvalue() == "saved [red]here[/red][2J\nnext\n"


def test_on_a_terminal_the_last_values_and_messages_are_shown():
    stream = io.StringIO()
    with Progress(stream=stream, live=True) as progress:
        progress.start(2)
        progress.step({"step": 1, "reward/mean": 0.125, "ratio/ess": math.nan})
        progress.message("[bold] checkpoint")
        progress.step({"step": 2, "reward/mean": 0.875})
    progress.stop()
    shown = stream.getvalue()
    assert "0.875" in shown
    assert "[bold] checkpoint" in shown
    assert "ratio ESS" not in shown


@pytest.mark.parametrize(("values", "curve"), [([0, 1, 2, 7], "▁▂▃█"), ([3.0, 3.0], "▅▅"), ([-1, 1], "▁█"), ([5], "▅")])
def test_a_sparkline_spans_the_range_of_its_values(values, curve):
    assert sparkline(values) == curve


def test_a_sparkline_can_do_without_unicode():
    assert sparkline([0, 1, 2, 3], ascii_only=True).isascii()
