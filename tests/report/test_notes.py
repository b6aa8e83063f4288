"""What the report says about a run that looks off, and that it keeps silent about one that does not."""

from __future__ import annotations

import pytest
from run_folders import FINISHED, healthy_rows, make_run

from brace_rl.report.notes import notes
from brace_rl.report.run_data import read_run


def notes_of(tmp_path, steps=40, summary=FINISHED, **changed):
    return notes(read_run(make_run(tmp_path / "run", rows=healthy_rows(steps, **changed), summary=summary)))


def test_nothing_is_said_about_a_healthy_run(tmp_path):
    assert notes_of(tmp_path) == []


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"ratio__ess": 0.05}, "The effective sample size fell to 0.050"),
        ({"value__explained_variance": -0.2}, "Explained variance is -0.20 at the end"),
        ({"critic__grad_norm": None}, "Not finite at some steps: critic/grad_norm (first at step 1)."),
        ({"response__truncated": 0.3}, "30% of the responses are cut at the length limit"),
        ({"staleness__max": 6}, "Tokens of age 6 were consumed although schedule.max_staleness is 4."),
        ({"ratio__log_abs_max": 0.0}, "Every ratio of the last step is exactly 1 although its tokens are stale"),
        ({"staleness__max": 0}, "At staleness 0 log-probs of engine and trainer differ by up to 0.7"),
        ({"drift__m": 0.01}, "The mean log of the capped ratio is positive"),
        ({"window_weight__mean": 1e-5}, "The window weight is 1.0e-05 on average"),
        ({"window_weight__max": 1e4}, "The window weight reaches 1e+04"),
        ({"reward__std": 0.0}, "All rewards of the last steps are equal"),
        ({"backend__restarts": 2}, "Rollout processes were restarted 2 time(s)."),
        ({"time__step": 1.1}, "Step time times throughput misses the tokens of a step by up to 10.0%"),
    ],
)
def test_each_oddity_is_said_alone(tmp_path, changed, expected):
    found = notes_of(tmp_path, **changed)
    assert len(found) == 1
    assert expected in found[0]


@pytest.mark.parametrize(
    ("summary", "expected"),
    [
        ({"status": "interrupted"}, "The run ended early (interrupted) after step 40 of 40."),
        ({"ledger": {"issued": 100, "consumed": 80, "dropped": 4, "in_flight": 15}}, "The ledger does not balance"),
        (
            {"ledger": {"issued": 100, "consumed": 60, "dropped": 24, "in_flight": 16}},
            "24% of the prompts were dropped",
        ),
        ({"eval_after": {"eval/success": 0.27, "eval/problems": 512}}, "the change may be chance"),
    ],
)
def test_each_oddity_of_the_summary_is_said_alone(tmp_path, summary, expected):
    found = notes_of(tmp_path, summary={**FINISHED, **summary})
    assert len(found) == 1
    assert expected in found[0]


def test_a_run_without_summary_is_going_on_or_was_killed(tmp_path):
    assert notes_of(tmp_path, steps=7, summary=None) == [
        "There is no summary.json: the run is still going, or was killed, after step 7 of 40."
    ]


def test_rounding_is_no_mismatch(tmp_path):
    assert notes_of(tmp_path, drift__m=1e-8, staleness__max=0, staleness__mean=0, ratio__log_abs_max=5e-7) == []


def test_a_critic_at_the_start_and_ratios_of_one_in_warm_up_are_no_oddity(tmp_path):
    assert notes_of(tmp_path, steps=5, value__explained_variance=-3.0, ratio__log_abs_max=0.0) == []


def test_trouble_that_was_overcome_is_not_repeated(tmp_path):
    rows = healthy_rows(40)
    for row in rows[1:20]:
        row |= {"ratio/ess": 0.01, "value/explained_variance": -5.0, "response/truncated": 0.9}
    assert notes(read_run(make_run(tmp_path / "run", rows=rows, summary=FINISHED))) == []
