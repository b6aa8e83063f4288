"""What is said while cells run."""

import io
import json

from rich.console import Console

from brace_rl.compare.progress import CompareProgress, duration, last_row


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def progress(tmp_path, *, terminal=False, **changed):
    text, clock = io.StringIO(), Clock()
    arguments = {"total": 6, "already": 2, "workers": 2, "steps": 10, "run_dir": lambda name: tmp_path / name}
    console = Console(file=text, force_terminal=terminal, width=120)
    return CompareProgress(**{**arguments, **changed}, console=console, clock=clock), clock, text


def test_the_time_left_is_the_mean_duration_of_the_rest_over_the_workers(tmp_path):
    shown, clock, text = progress(tmp_path)
    with shown:
        shown.began("a", "ppo")
        shown.began("b", "brace")
        assert shown.seconds_left() is None
        clock.now = 100.0
        shown.ended("a", "success 0.500")
        # 3 cells are left, one of which has had its mean duration already: 2 x 100 s on 2 workers.
        assert shown.seconds_left() == 100.0
        shown.began("c", "kpop")
        clock.now = 150.0
        assert shown.seconds_left() == (3 - 1 - 0.5) * 100 / 2
    assert text.getvalue() == "3/6  ppo: success 0.500, 1:40; left 1:40\n"


def test_lines_hold_no_control_codes_and_no_markup(tmp_path):
    shown, _, text = progress(tmp_path)
    shown.message("a\x1b[31m[red]b[/red]\nc")
    assert text.getvalue() == "a[31m[red]b[/red]c\n"


def test_on_a_terminal_running_cells_are_shown_with_their_steps(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "metrics.jsonl").write_text('{"step": 6}\n{"step": 7}\n{"st')
    shown, _, text = progress(tmp_path, terminal=True)
    with shown:
        shown.began("a", "ppo, S = 9")
        shown.tick()
    assert "ppo, S = 9" in text.getvalue()
    assert "step 7/10" in text.getvalue()


def test_the_last_whole_row_is_read(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert last_row(path) == {}
    path.write_text(json.dumps({"step": 1}))
    assert last_row(path) == {}
    path.write_text("".join(json.dumps({"step": i, "x": "y" * 100}) + "\n" for i in range(500)))
    assert last_row(path)["step"] == 499


def test_durations_read_well():
    assert [duration(s) for s in (3.4, 59.4, 185, 3729)] == ["3 s", "59 s", "3:05", "1:02:09"]
