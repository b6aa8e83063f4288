"""What is written: every cell is in it, nothing of a critic where there is none, and no text gets out of its place."""

import csv
import io
import json
import re
from dataclasses import replace

import pytest
from compare_parts import FakeTrainer, folder_for, plan_for
from rich.console import Console

from brace_rl.compare.measures import MEASURES
from brace_rl.compare.outcomes import CellOutcome, method_rows, read_comparison
from brace_rl.compare.page import render
from brace_rl.compare.run import run_cells, write_results
from brace_rl.compare.tables import (
    COST_HEADS,
    NONE,
    SUCCESS_HEADS,
    cost_rows,
    curves_csv,
    measure_heads,
    measure_rows,
    method_heads,
    notes,
    results_json,
    success_rows,
    table_csv,
    table_markdown,
)

METHODS = ["ppo", "brace+icepop", "grpo"]


def better_with_brace(config, step):
    gain = 0.125 if config.algorithm.value_target == "brace" else 0.0
    return 0.25 + gain * (step > 0) + 0.01 * config.run.seed


def grpo_of_seed_2_fails(config):
    is_grpo = config.algorithm.value_target == "none"
    return "<script>alert(1)</script>\x1b[31m diverged & gone" if is_grpo and config.run.seed == 2 else None


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("compare")
    overrides = {"rollout.samples_per_prompt": "2"}
    plan = plan_for(tmp_path, methods=METHODS, seeds=[0, 1, 2], staleness=[0, 4], overrides=overrides)
    folder = folder_for(tmp_path)
    trainer = FakeTrainer(better_with_brace, grpo_of_seed_2_fails)
    console = Console(file=io.StringIO(), width=200)
    run_cells(plan, folder, workers=4, retry=False, launch=trainer, console=console)
    return plan, folder, read_comparison(plan, folder)


def test_the_best_is_marked_where_its_seeds_support_it(made):
    _, _, comparison = made
    rows = comparison.at(4)
    assert [row.is_best for row in rows] == [False, True, False]
    assert success_rows(rows)[1][2] == "0.385 *"
    assert rows[1].behind is None
    assert rows[0].behind.value == pytest.approx(0.125)
    assert rows[0].behind.low == pytest.approx(0.125)


def test_without_a_critic_its_figures_are_a_dash(made):
    _, _, comparison = made
    heads, rows = measure_heads(), measure_rows(comparison.at(0))
    shown = dict(zip(heads, rows[2], strict=True))
    assert {m.title for m in MEASURES if shown[m.title] == NONE} >= {m.title for m in MEASURES if m.of_critic}
    # 1 - step / 8 over four steps of two seeds, and over the three of the seed that failed.
    assert shown["ESS"] == f"{(2 * 0.6875 + 0.75) / 3:.3f}"
    assert dict(zip(heads, rows[0], strict=True))["g_hat, fresh responses"] == "0.25"


def test_a_figure_that_no_run_has_logged_is_a_dash_for_all(made):
    _, _, comparison = made
    column = measure_heads().index("separation")
    assert {row[column] for row in measure_rows(comparison.rows)} == {NONE}


def test_diagnostics_are_those_of_the_rows(made):
    _, _, comparison = made
    measures = comparison.rows[0].measures
    assert measures["gap_fresh"].value == pytest.approx(abs(0.25 - 0.5))
    assert measures["gap_batch"].value == pytest.approx(abs(0.25 - 0.375))
    assert measures["ess"].value == pytest.approx((7 / 8 + 6 / 8 + 5 / 8 + 4 / 8) / 4)
    assert measures["advantage_max"].value == 4
    assert comparison.rows[0].courses["ess"] == [(1, 7 / 8), (2, 6 / 8), (3, 5 / 8), (4, 4 / 8)]


def test_seconds_times_throughput_is_tokens(made):
    _, _, comparison = made
    for row in comparison.rows:
        assert row.seconds_per_step * row.tokens_per_second == pytest.approx(row.tokens_per_step)
    assert cost_rows(comparison.rows)[0] == ["ppo", "0.5", "200", "100"]


def test_tables_hold_every_method_at_every_staleness(made):
    _, _, comparison = made
    table = list(csv.DictReader(io.StringIO(table_csv(comparison))))
    assert [(row["staleness"], row["method"]) for row in table] == [(s, m) for s in ("0", "4") for m in METHODS]
    assert (table[2]["finished"], table[2]["failed"]) == ("2", "1")
    assert table[2]["gap_fresh"] == ""
    assert float(table[4]["final"]) == pytest.approx(0.385)
    curves = list(csv.DictReader(io.StringIO(curves_csv(comparison))))
    assert [row["success"] for row in curves if row["method"] == "ppo" and row["staleness"] == "0"][1] == ""
    assert {row["step"] for row in curves} == {"0", "1", "2", "3", "4"}


def test_markdown_holds_the_tables_of_every_staleness(made):
    _, _, comparison = made
    text = table_markdown(comparison)
    titles = [line for line in text.splitlines() if line.startswith("#")]
    assert titles == ["### S = 0", "### S = 4", "### Notes", "### What makes each method"]
    assert len([line for line in text.splitlines() if line.startswith("* failed: grpo, S = ")]) == 2
    rows = [line for line in text.splitlines() if line.startswith("| ppo |")]
    assert len(rows) == 2 * 3 + 1
    assert {line.replace("\\|", "").count("|") for line in text.splitlines() if line.startswith("| ")} == {
        len(heads) + 1 for heads in (SUCCESS_HEADS, measure_heads(), COST_HEADS, method_heads(comparison))
    }


def test_the_settings_that_make_a_method_stand_beside_its_figures(made):
    _, _, comparison = made
    parts = results_json(comparison)["method_settings"]
    assert list(parts) == METHODS
    assert (parts["brace+icepop"]["algorithm"]["value_target"], parts["brace+icepop"]["actor"]["high"]) == (
        "brace",
        5.0,
    )
    for text in (render(comparison), table_markdown(comparison)):
        assert "rule = icepop" in text
        assert "value_target = brace, window = 100" in text


def test_the_json_holds_the_courses_that_the_curves_hold(made):
    _, _, comparison = made
    table = json.loads(json.dumps(results_json(comparison), allow_nan=False))["table"]
    assert table[0]["courses"]["ess"] == [[1, 7 / 8], [2, 6 / 8], [3, 5 / 8], [4, 4 / 8]]
    assert all(set(row["courses"]) == {m.key for m in MEASURES} for row in table)
    for row in csv.DictReader(io.StringIO(curves_csv(comparison))):
        (found,) = (x for x in table if (x["method"], str(x["staleness"])) == (row["method"], row["staleness"]))
        for measure in MEASURES:
            values = dict(found["courses"][measure.key])
            assert str(values.get(int(row["step"]), "")) == row[measure.key]


def test_steps_that_train_the_actor_are_told_where_methods_differ_in_them(made):
    _, _, comparison = made
    assert results_json(comparison)["actor_steps"] == {"ppo": "3", "brace+icepop": "3", "grpo": "4"}
    page = render(comparison)
    assert "ppo 3, brace+icepop 3, grpo 4. The critic&#x27;s warm-up steps train no actor." in page
    assert "<dd>3</dd>" in render(replace(comparison, actor_steps=dict.fromkeys(METHODS, "3")))
    assert table_markdown(comparison).splitlines()[-3].endswith(" | 4 |")


def test_the_json_holds_every_cell_the_failed_ones_too_and_is_strict(made):
    _, _, comparison = made
    text = json.dumps(results_json(comparison), allow_nan=False)
    cells = json.loads(text)["cells"]
    assert len(cells) == 18
    assert [c["status"] for c in cells if c["method"] == "grpo" and c["seed"] == 2] == ["failed", "failed"]
    assert all(len(c["evaluations"]) == 3 for c in cells if c["status"] == "finished")


def test_the_page_is_one_file_that_shows_failures_and_escapes_all_text(made):
    _, _, comparison = made
    page = render(replace(comparison, recipe='<img src=x>"&', settings={"task.data": "<b>"}))
    assert "<script" not in page
    assert "<img" not in page
    assert "<b>" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;⟨U+001B⟩[31m diverged &amp; gone" in page
    assert "2 of 3, 1 failed" in page
    assert page.count("<svg") >= 2 * (1 + 5)
    assert re.findall(r"<(?:link|script|iframe|object|img)|url\(|@import", page) == []
    assert "Content-Security-Policy" in page


def test_every_file_is_written_and_the_tables_are_printed(made, tmp_path):
    plan, folder, _ = made
    text = io.StringIO()
    write_results(plan, folder, Console(file=text))
    for name in ("table.csv", "table.md", "curves.csv", "results.json", "compare.html", "compare.png", "compare.svg"):
        assert (folder.out / name).stat().st_size > 0
    assert "failed: grpo, S = 0, seed 2, after step 3: <script>" in text.getvalue()
    assert (folder.out / "compare.png").read_bytes().startswith(b"\x89PNG")


def test_an_s_that_no_batch_reaches_is_told(made):
    _, _, comparison = made
    note = "S = 4: no batch of a run of 4 trainer steps is older than 3"
    assert note in notes(comparison)
    assert note in render(comparison)
    assert notes(replace(comparison, steps=5, cells=[])) == []


def test_cells_that_were_not_run_and_cells_of_other_settings_are_told(made):
    plan, folder, _ = made
    text = io.StringIO()
    other = replace(plan, cells=[replace(cell, name=f"other-{cell.name}") for cell in plan.cells])
    write_results(other, folder, Console(file=text, width=200))
    assert f"18 of 18 cells have not been run to their end; {folder.out} holds 18 of other settings" in text.getvalue()


def test_nothing_run_yet_is_a_table_of_dashes(tmp_path):
    plan, folder = plan_for(tmp_path), folder_for(tmp_path)
    write_results(plan, folder, Console(file=io.StringIO()))
    rows = read_comparison(plan, folder).rows
    assert success_rows(rows)[0] == ("ppo", "0 of 2", NONE, NONE, NONE, NONE, NONE)
    assert json.loads((folder.out / "results.json").read_text())["table"][0]["final"] is None


def test_methods_are_compared_on_the_seeds_they_share():
    def cell(method, seed, final):
        status = "not run" if final is None else "finished"
        return CellOutcome(method, 4, seed, "cells/x", status, final=final, area=final, evaluations=[(0.0, 0.0)])

    cells = [cell("a", 0, 0.5), cell("a", 1, 0.75), cell("a", 2, 0.9), cell("b", 0, 0.25), cell("b", 1, 0.49)]
    cells.append(cell("b", 2, None))
    rows = method_rows(["a", "b"], 4, cells)
    assert rows[1].behind.value == pytest.approx(0.255)
    assert rows[0].is_best
