"""The command: files written, exit codes, what a reader sees; the page loads nothing and escapes everything."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from click.testing import CliRunner
from rollout_rows import clean_rows, write_rows

from brace_rl.diagnose.command import diagnose_command
from brace_rl.errors import DataError

SHARED = Path(__file__).resolve().parents[2] / ".." / "shared" / "data" / "rollouts"


def run(*words):
    return CliRunner().invoke(diagnose_command, [str(word) for word in words])


VOID = {"meta"}


class Page(HTMLParser):
    """Collects tags, their attributes and the text, and checks that tags close in order."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(source)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_tables_json_and_page_tell_the_same(tmp_path):
    path = write_rows(tmp_path / "r.jsonl", clean_rows(gain=1.0))
    result = run(path, "--out", tmp_path / "out", "--window", "30")
    assert result.exit_code == 0, result.output
    written = json.loads((tmp_path / "out" / "diagnosis.json").read_text())
    page = Page((tmp_path / "out" / "diagnosis.html").read_text())
    assert written["verdict"]["state"] == "stale"
    assert written["statistics"]["settings"]["window"] == 30
    assert "importance sampling" in written["expectation_under_pi"]
    assert {"brace", "capped", "gae", "vtrace"} == set(written["statistics"]["bins"][0]["beta"])
    window = written["recommendations"][0]
    assert window["name"] == "window"
    assert "Eq. 45" in window["reason"]
    for text in (result.output, page.text):
        assert "critic_stale" in text
        assert f"window = {window['value']:g}" in text.replace("\n", " ")
        assert "SNIS" in text
        assert "(mismatch)" in text
    assert page.tags.count("svg") == 5
    histogram = written["statistics"]["lags"][0]["histogram"]
    assert sum(histogram) == written["statistics"]["lags"][0]["tokens"]
    assert len(written["histogram_edges"]) == len(histogram) - 1


def test_page_loads_nothing_and_escapes_what_it_shows(tmp_path):
    attack = '<script>alert(1)<img src=x onerror=y>&\u202e".jsonl'.replace("/", "")
    path = write_rows(tmp_path / attack, clean_rows(prompts=12))
    assert run(path, "--out", tmp_path).exit_code == 0
    source = (tmp_path / "diagnosis.html").read_text()
    page = Page(source)
    assert {"script", "img", "link", "iframe"} & set(page.tags) == set()
    assert "http" not in source.replace("http-equiv", "")
    assert {name for name, _ in page.attributes} & {"src", "href", "onerror", "style"} == set()
    assert "<script>alert(1)<img" in page.text
    assert "\u202e" not in source


def test_a_run_folder_lends_its_settings_and_gets_the_results(tmp_path):
    write_rows(tmp_path / "rollouts.jsonl", clean_rows(prompts=12))
    (tmp_path / "config.json").write_text(json.dumps({"algorithm": {"window": 20, "lam": 0.9, "c_clip": 1.0}}))
    result = run(tmp_path, "--lam", "0.95")
    assert result.exit_code == 0, result.output
    settings = json.loads((tmp_path / "diagnosis.json").read_text())["statistics"]["settings"]
    assert (settings["window"], settings["lam"], settings["c_clip"], settings["rho_clip"]) == (20, 0.95, 1.0, 1.2)
    assert "lambda_with_long_window" in result.output


@pytest.mark.parametrize(
    ("words", "reason"), [(("--window", "-1"), "--window"), (("--eps", "1"), "--eps"), (("--lam", "0"), "--lam")]
)
def test_options_out_of_range_are_refused(tmp_path, words, reason):
    path = write_rows(tmp_path / "r.jsonl", clean_rows(prompts=2))
    error = run(path, *words).exception
    assert isinstance(error, DataError)
    assert reason in str(error)


def test_malformed_input_is_one_line_and_nothing_is_written(tmp_path):
    path = tmp_path / "r.jsonl"
    path.write_text('{"values": [1, 2]}\n{"values": "x"}\n')
    error = run(path, "--out", tmp_path / "out").exception
    assert isinstance(error, DataError)
    assert str(error) == f"{path}: row 2: values: expected a list of numbers, one per response token, found 'x'"
    assert not (tmp_path / "out").exists()


def test_neither_trainer_nor_models_are_imported():
    code = (
        "import sys; from brace_rl.diagnose import command, diagnosis, page, terminal;"
        "print([m for m in sys.modules if m.startswith(('transformers', 'brace_rl.training', 'matplotlib'))])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=dict(os.environ)
    )
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.skipif(not SHARED.is_dir(), reason="the shared sample files are not there")
@pytest.mark.parametrize(
    ("name", "maps"),
    [
        (
            "nemogym_competitive_coding_rollouts_LOGPROBS.jsonl",
            {
                "behavior_logprobs": "response.output.*.generation_log_probs",
                "token_ids": "response.output.*.generation_token_ids",
                "prompt_id": "problem_id",
            },
        ),
        ("openai_chat_completion_LOGPROBS.json", {"behavior_logprobs": "choices.0.logprobs.content.*.logprob"}),
    ],
)
def test_real_sampler_logprobs_are_read_and_what_is_missing_is_said(tmp_path, name, maps):
    options = [word for ours, theirs in maps.items() for word in ("--map", f"{ours}={theirs}")]
    result = run(SHARED / name, *options, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    written = json.loads((tmp_path / "diagnosis.json").read_text())
    assert written["verdict"]["state"] == "cannot tell"
    assert all(advice["value"] is None for advice in written["recommendations"])
    needs = {missing["figure"]: missing["columns"] for missing in written["missing"]}
    assert needs["ratios, ESS, drift, window weights, recommended settings"] == ["target_logprobs"]
    assert "needs target_logprobs" in result.output
    names = {finding["name"] for finding in written["findings"]}
    assert "too_few_rows" in names
    assert "placeholder_logprobs" not in names
    assert written["statistics"]["counts"]["tokens"] in (17, 5023)
