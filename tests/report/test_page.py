"""The report as a page: self-contained, escaped, and there whatever state the run is in."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest
from run_folders import CONFIG, FINISHED, HEALTHY, healthy_rows, make_run

from brace_rl.errors import BraceError
from brace_rl.report import write_report

ATTACK = '<script>alert(1)</script><img src="http://x.example/a.png">&amp;"\x00\x1b\u202e\ud800'
VOID = {"meta", "br"}


class Page(HTMLParser):
    """Collects tags and text, and checks that tags close in order."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.tool_text = ""
        self._open: list[tuple[str, str]] = []
        self.feed(source)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append((tag, dict(attrs).get("class") or ""))

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self._open.pop()[0] == tag

    def handle_data(self, data):
        if any(tag == "style" for tag, _ in self._open):
            return
        self.text += data
        if any(kind == "tool" for _, kind in self._open):
            self.tool_text += data


def sample(step: int, **changed) -> dict:
    response = [{"text": "call", "policy": True}, {"text": "84", "policy": False}, {"text": "end", "policy": True}]
    base = {"step": step, "prompt": "12*7=", "response": response, "reward": 1.0, "success": True, "problem_id": "p"}
    return {**base, "versions": [[3, 4], [4, 1]], "truncated": False, **changed}


def render(run) -> Page:
    return Page(write_report(run).read_text(encoding="utf-8"))


def test_text_of_the_run_cannot_become_markup(tmp_path):
    hostile = sample(1, prompt=ATTACK, problem_id=ATTACK, response=[{"text": ATTACK, "policy": False}])
    config = {**CONFIG, "task": {"name": ATTACK}, ATTACK: {ATTACK: ATTACK}}
    rows = [{"step": 1, "reward/mean": 0.5, ATTACK: 1.0, f"ledger/{ATTACK}": 1.0}]
    page = render(make_run(tmp_path / "run", rows=rows, samples=[hostile], config=config, summary={"status": ATTACK}))
    names = {tag for tag, _ in page.tags}
    assert not names & {"script", "img", "iframe", "link", "object"}
    assert page.text.count("<script>alert(1)</script>") >= 5
    assert "⟨U+0000⟩⟨U+001B⟩⟨U+202E⟩" in page.text


def test_nothing_is_loaded_and_nothing_runs(tmp_path):
    source = write_report(
        make_run(tmp_path / "run", rows=healthy_rows(40), samples=[sample(1)], summary=FINISHED)
    ).read_text()
    page = Page(source)
    for _, attributes in page.tags:
        assert not {"src", "href", "srcset", "data", "xlink:href"} & set(attributes)
        assert not any(name.startswith("on") for name in attributes)
    assert not re.search(r"url\(|@import|https?://", source)
    assert "default-src 'none'" in source


def test_the_headline_says_what_was_trained_and_what_came_of_it(tmp_path):
    text = render(make_run(tmp_path / "run", rows=healthy_rows(40), summary=FINISHED)).text
    # Wilson intervals of 128 and 384 of 512.
    assert "25.0% [21.4%, 28.9%]" in text
    assert "75.0% [71.1%, 78.6%]" in text
    for fact in ("brace, window 100, clips 1.2 / 1.1", "async, S = 4", "0.87 M parameters", "40 of 40", "90 s"):
        assert fact in text


def test_every_planned_figure_and_every_unplanned_one_is_drawn(tmp_path):
    page = render(make_run(tmp_path / "run", rows=healthy_rows(40, task__surprise=3.0), summary=FINISHED))
    labels = [attributes["aria-label"] for tag, attributes in page.tags if tag == "svg"]
    for title in ("Reward", "Success", "Staleness", "Effective sample size", "Critic error", "Seconds per phase"):
        assert title in labels
    assert labels[-1] == "task/surprise"


def test_time_throughput_and_tokens_stand_side_by_side(tmp_path):
    rows = healthy_rows(2)
    rows[2] |= {"time/step": 2.0, "tokens/step": 1700.0}
    text = render(make_run(tmp_path / "run", rows=rows)).text
    assert "2.000900.01,8001,700+5.88%0.900" in text
    assert "all 23.000900.02,7002,600+3.85%1.800" in text  # 1 s and 2 s at 900 tokens/s; 900 + 1700 tokens


@pytest.mark.parametrize(
    ("in_flight", "buffered", "verdict"), [(16, 0, "balances"), (15, 0, "off by 1"), (10, 6, "balances")]
)
def test_the_ledger_is_added_up(tmp_path, in_flight, buffered, verdict):
    rows = healthy_rows(3, ledger__in_flight=in_flight, ledger__buffered=buffered)
    text = render(make_run(tmp_path / "run", rows=rows)).text
    assert verdict in text


def test_early_and_late_samples_are_shown_with_tool_output_shaded(tmp_path):
    page = render(make_run(tmp_path / "run", rows=healthy_rows(9), samples=[sample(step) for step in (1, 5, 9)]))
    assert page.text.count("12*7=call84end") == 2
    assert page.tool_text == "Shaded8484"
    assert "version × tokens: 3 × 4, 4 × 1" in page.text


def test_a_very_long_response_is_shortened_and_says_so(tmp_path):
    long = sample(1, response=[{"text": "x" * 9000, "policy": True}])
    page = render(make_run(tmp_path / "run", samples=[long]))
    assert page.text.count("x") < 5000
    assert "the rest is in samples.jsonl" in page.text


@pytest.mark.parametrize("steps", [0, 1, 2, 500])
def test_a_run_of_any_length_has_a_report(tmp_path, steps):
    page = render(make_run(tmp_path / "run", rows=healthy_rows(steps)))
    assert f"{steps} of 40" in page.text
    assert sum(tag == "svg" for tag, _ in page.tags) >= (10 if steps else 1)


def test_a_folder_with_nothing_but_its_configuration_has_a_report(tmp_path):
    assert "not evaluated" in render(make_run(tmp_path / "run")).text


def test_figures_that_are_never_finite_are_left_out(tmp_path):
    rows = [{"step": 1, **dict.fromkeys(HEALTHY)}]
    page = render(make_run(tmp_path / "run", rows=rows))
    assert "Not finite at some steps" in page.text
    assert "nan" not in page.text.lower().replace("finance", "")


@pytest.mark.parametrize(
    "changed",
    [{"response": None}, {"response": ["x", 3]}, {"versions": "no"}, {"versions": [[1], 2]}, {"prompt": None}],
)
def test_a_sample_of_another_shape_does_not_stop_the_report(tmp_path, changed):
    assert "reward 1.0" in render(make_run(tmp_path / "run", samples=[sample(1, **changed)])).text


def test_a_folder_that_is_not_a_run_gets_no_report(tmp_path):
    with pytest.raises(BraceError, match="not a run folder"):
        write_report(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_reader_loads_neither_trainer_nor_torch_nor_plotting():
    code = "import sys, brace_rl.report; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    loaded = set(result.stdout.split())
    assert "brace_rl.report.page" in loaded
    assert not loaded & {"torch", "transformers", "matplotlib", "brace_rl.training"}
