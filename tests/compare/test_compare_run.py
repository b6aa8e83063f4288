"""What is run, what is not run again, and what a failure becomes. Nothing is trained here."""

import io
import json

import pytest
from compare_parts import RECIPE, FakeTrainer, folder_for, plan_for
from rich.console import Console

from brace_rl.compare.outcomes import read_comparison
from brace_rl.compare.run import run_cells, write_results
from brace_rl.errors import BraceError

DIVERGED = "step 4: the critic's gradient has norm inf; training has diverged, lower optim.critic_lr"


def compare(tmp_path, trainer, *, plan=None, retry=False, workers=2):
    plan = plan or plan_for(tmp_path)
    folder, text = folder_for(tmp_path), io.StringIO()
    run_cells(plan, folder, workers=workers, retry=retry, launch=trainer, console=Console(file=text, width=200))
    return plan, folder, text.getvalue()


def brace_of_seed_1_fails(config):
    is_brace = config.algorithm.value_target == "brace" and bool(config.model.path)
    return DIVERGED if is_brace and config.run.seed == 1 else None


def test_every_cell_is_run_once_after_one_warm_start_per_seed(tmp_path):
    trainer = FakeTrainer()
    plan, folder, text = compare(tmp_path, trainer)
    starts, cells = [start.name for start in plan.starts], [cell.name for cell in plan.cells]
    assert trainer.new_runs == starts + cells
    assert all(folder.status(cell) == "finished" for cell in plan.cells)
    assert "4/4  brace, S = 2, seed 1: success 0.750" in text


def test_a_finished_cell_is_not_run_again(tmp_path):
    compare(tmp_path, FakeTrainer())
    again = FakeTrainer()
    compare(tmp_path, again)
    assert again.commands == []


def test_more_methods_and_seeds_run_only_what_is_new(tmp_path):
    compare(tmp_path, FakeTrainer())
    again = FakeTrainer()
    plan, _, _ = compare(tmp_path, again, plan=plan_for(tmp_path, methods=["ppo", "brace", "kpop"], seeds=[0, 1, 2]))
    assert len(again.new_runs) == 1 + 2 + 3
    assert again.new_runs[0] == plan.starts[2].name


def test_other_settings_neither_use_nor_touch_the_cells_there_are(tmp_path):
    plan, folder, _ = compare(tmp_path, FakeTrainer())
    again = FakeTrainer()
    compare(tmp_path, again, plan=plan_for(tmp_path, overrides={"optim.actor_lr": "1e-5"}))
    assert len(again.new_runs) == 4
    assert all(folder.status(cell) == "finished" for cell in plan.cells)


def test_a_half_done_cell_goes_on_from_its_checkpoint(tmp_path):
    plan, folder, _ = compare(tmp_path, FakeTrainer())
    run_dir = folder.run_dir(plan.cells[0])
    (run_dir / "summary.json").unlink()
    (run_dir / "checkpoints" / "step_000003").mkdir(parents=True)
    (run_dir / "checkpoints" / "step_000003" / "state.json").write_text("{}")
    again = FakeTrainer()
    compare(tmp_path, again)
    assert again.commands == [["--resume", str(run_dir)]]
    assert folder.status(plan.cells[0]) == "finished"


@pytest.mark.parametrize("checkpoint", [None, "step_000004", "step_0000"])
def test_a_half_done_cell_without_anything_to_go_on_from_is_started_again(tmp_path, checkpoint):
    plan, folder, _ = compare(tmp_path, FakeTrainer())
    run_dir = folder.run_dir(plan.cells[0])
    (run_dir / "summary.json").unlink()
    (run_dir / "left.txt").write_text("by the first try")
    if checkpoint:
        (run_dir / "checkpoints" / checkpoint).mkdir(parents=True)
        (run_dir / "checkpoints" / checkpoint / "state.json").write_text("{}")
    again = FakeTrainer()
    compare(tmp_path, again)
    assert again.new_runs == [plan.cells[0].name]
    assert not (run_dir / "left.txt").exists()


def test_an_interrupted_cell_is_half_done_and_no_failure(tmp_path):
    trainer = FakeTrainer()

    def interrupt(command, log, inherited):
        if len(trainer.commands) == 3:
            raise KeyboardInterrupt
        return trainer(command, log, inherited)

    with pytest.raises(KeyboardInterrupt):
        compare(tmp_path, interrupt, workers=1)
    assert not (tmp_path / "out" / "failures").exists()
    again = FakeTrainer()
    plan, _, _ = compare(tmp_path, again)
    assert again.new_runs == [cell.name for cell in plan.cells[1:]]


def test_a_failed_cell_is_told_with_its_error_and_the_others_go_on(tmp_path):
    plan, folder, text = compare(tmp_path, FakeTrainer(fail=brace_of_seed_1_fails))
    failed = [cell for cell in plan.cells if folder.status(cell) == "failed"]
    assert [cell.label for cell in failed] == ["brace, S = 2, seed 1"]
    assert folder.failure(failed[0]) == (2, DIVERGED)
    assert f"brace, S = 2, seed 1: failed: {DIVERGED}" in text
    assert "1 of 4 cells failed" in text


def test_a_failed_cell_is_run_again_from_its_beginning_and_only_when_asked_for(tmp_path):
    plan, folder, _ = compare(tmp_path, FakeTrainer(fail=brace_of_seed_1_fails))
    same = FakeTrainer()
    compare(tmp_path, same)
    assert same.commands == []
    again = FakeTrainer()
    compare(tmp_path, again, retry=True)
    assert again.new_runs == [plan.cells[-1].name]
    assert folder.status(plan.cells[-1]) == "finished"


def test_a_failed_cell_counts_with_its_last_success(tmp_path):
    plan, folder, _ = compare(tmp_path, FakeTrainer(fail=brace_of_seed_1_fails))
    comparison = read_comparison(plan, folder)
    ppo, brace = comparison.rows
    assert (ppo.seeds, brace.seeds, brace.failed) == ("2 of 2", "1 of 2", 1)
    # Success is 0.25 + 0.125 x step; the failed cell was last evaluated after step 2 of 4.
    assert ppo.final.value == pytest.approx(0.75)
    assert brace.final.value == pytest.approx((0.75 + 0.5) / 2)
    assert brace.area.value == pytest.approx((0.5 + (2 * 0.375 + 2 * 0.5) / 4) / 2)
    assert [(step, e.value) for step, e in brace.curve] == [(0, 0.25), (2, 0.5), (4, 0.625)]
    assert [cell.error for cell in comparison.failures] == [DIVERGED]


def test_a_cell_that_failed_before_any_evaluation_counts_with_its_seeds_start(tmp_path):
    plan, folder, _ = compare(tmp_path, FakeTrainer(fail=brace_of_seed_1_fails))
    run_dir = folder.run_dir(plan.cells[-1])
    (run_dir / "metrics.jsonl").write_text("")
    (run_dir / "summary.json").write_text(json.dumps({"status": "failed"}))
    assert read_comparison(plan, folder).rows[1].final.value == pytest.approx((0.75 + 0.25) / 2)


def test_a_cell_that_was_not_run_is_missing_and_counts_in_no_mean(tmp_path):
    plan, folder, _ = compare(tmp_path, FakeTrainer())
    (folder.run_dir(plan.cells[-1]) / "summary.json").unlink()
    comparison = read_comparison(plan, folder)
    brace = comparison.rows[1]
    assert (brace.seeds, brace.missing, comparison.missing) == ("1 of 2", 1, 1)
    assert brace.final.value == pytest.approx(0.75)


def test_a_failed_warm_start_ends_the_comparison_with_its_error(tmp_path):
    trainer = FakeTrainer(fail=lambda config: None if config.model.path else "task.operands: too many")
    with pytest.raises(BraceError, match=r"warm start of seed 0: task.operands: too many"):
        compare(tmp_path, trainer)
    assert len(trainer.new_runs) <= 2
    assert not (tmp_path / "out" / "cells").exists()


def test_without_a_warm_start_a_check_comes_first(tmp_path):
    text = RECIPE.replace("steps = 2", "steps = 0") + '[model]\npath = "some/model"\n'
    trainer = FakeTrainer(fail=lambda config: "some/model: no such folder")
    with pytest.raises(BraceError, match=r"^some/model: no such folder$"):
        compare(tmp_path, trainer, plan=plan_for(tmp_path, text))
    assert [words[-1] for words in trainer.commands] == ["--check"]


def test_a_run_that_is_not_the_cell_its_name_says_is_refused(tmp_path):
    plan, folder, _ = compare(tmp_path, FakeTrainer())
    path = folder.run_dir(plan.cells[0]) / "config.json"
    config = json.loads(path.read_text())
    config["optim"]["actor_lr"] = 0.5
    path.write_text(json.dumps(config))
    with pytest.raises(BraceError, match="is not the cell its name says; delete it"):
        compare(tmp_path, FakeTrainer())


def test_a_folder_in_use_is_refused(tmp_path):
    with folder_for(tmp_path).locked(), pytest.raises(BraceError, match="another brace compare"):
        compare(tmp_path, FakeTrainer())


def test_cells_read_a_copy_of_the_recipe(tmp_path):
    trainer = FakeTrainer()
    compare(tmp_path, trainer)
    assert {words[0] for words in trainer.commands} == {str(tmp_path / "out" / "recipe.toml")}
    assert (tmp_path / "out" / "recipe.toml").read_text() == RECIPE


@pytest.mark.parametrize(("keep", "kept"), [(False, 0), (True, 1)])
def test_checkpoints_of_finished_cells_are_kept_only_when_asked_for(tmp_path, keep, kept):
    plan, folder = plan_for(tmp_path, methods=["ppo"], seeds=[0]), folder_for(tmp_path, keep_models=keep)
    run_cells(plan, folder, workers=1, retry=False, launch=FakeTrainer(), console=Console(file=io.StringIO()))
    assert len(list(folder.run_dir(plan.cells[0]).glob("checkpoints/step_*"))) == kept


def test_checkpoints_of_a_cell_that_finished_alone_go_at_the_next_start(tmp_path):
    plan = plan_for(tmp_path, methods=["ppo"], seeds=[0])
    kept = folder_for(tmp_path, keep_models=True)
    run_cells(plan, kept, workers=1, retry=False, launch=FakeTrainer(), console=Console(file=io.StringIO()))
    checkpoints = kept.run_dir(plan.cells[0]) / "checkpoints"
    again = FakeTrainer()
    run_cells(plan, kept, workers=1, retry=False, launch=again, console=Console(file=io.StringIO()))
    assert checkpoints.exists()
    compare(tmp_path, again, plan=plan)
    assert not checkpoints.exists()
    assert again.commands == []


def test_a_half_done_cell_keeps_its_checkpoints(tmp_path):
    plan, folder, _ = compare(tmp_path, FakeTrainer(fail=brace_of_seed_1_fails))
    compare(tmp_path, FakeTrainer())
    assert (folder.run_dir(plan.cells[-1]) / "checkpoints").exists()


def test_a_variant_is_its_method_with_settings_of_its_own(tmp_path):
    trainer = FakeTrainer()
    plan = plan_for(tmp_path, methods=["ppo", "estr:tau=0.5"], seeds=[0])
    compare(tmp_path, trainer, plan=plan)
    (command,) = (words for words in trainer.commands if f"--run.name={plan.cells[1].name}" in words)
    assert command[1:3] == ["--method", "estr"]
    assert "--actor.tau=0.5" in command
    assert not any("tau" in word for words in trainer.commands if words is not command for word in words)
    again = FakeTrainer()
    _, folder, _ = compare(tmp_path, again, plan=plan)
    assert again.commands == []
    assert [row.method for row in read_comparison(plan, folder).rows] == ["ppo", "estr:tau=0.5"]


DAMAGE = {
    "config.json is not valid JSON": lambda run: (run / "config.json").write_bytes(b"\xff{"),
    "no readable config.json": lambda run: (run / "config.json").unlink(),
    "summary.json is not valid JSON": lambda run: (run / "summary.json").write_text('{"status": "fin'),
    "summary.json holds no JSON object": lambda run: (run / "summary.json").write_text("[]"),
    "metrics.jsonl: Is a directory": lambda run: [(run / "metrics.jsonl").unlink(), (run / "metrics.jsonl").mkdir()],
}


@pytest.mark.parametrize("reason", DAMAGE)
def test_a_cell_whose_files_cannot_be_read_is_shown_as_that_and_can_be_run_again(tmp_path, reason):
    plan, folder, _ = compare(tmp_path, FakeTrainer())
    cell = plan.cells[-1]
    DAMAGE[reason](folder.run_dir(cell))
    same = FakeTrainer()
    _, _, text = compare(tmp_path, same)
    assert same.commands == []
    assert "1 of 4 cells failed" in text
    printed = io.StringIO()
    write_results(plan, folder, Console(file=printed, width=200))
    (line,) = (
        x for x in printed.getvalue().splitlines() if x.startswith("failed: brace, S = 2, seed 1, after step 0: ")
    )
    assert "its files cannot be read: " in line
    assert reason in line
    brace = read_comparison(plan, folder).rows[1]
    assert (brace.seeds, brace.failed) == ("1 of 2", 1)
    assert brace.final.value == pytest.approx(0.75), "it is not the method's fault and counts in no mean"
    again = FakeTrainer()
    compare(tmp_path, again, retry=True)
    assert again.new_runs == [cell.name]
    assert read_comparison(plan, folder).rows[1].seeds == "2 of 2"


def test_a_cell_whose_record_of_failing_is_damaged_is_still_failed(tmp_path):
    plan, folder, _ = compare(tmp_path, FakeTrainer(fail=brace_of_seed_1_fails))
    (record,) = (tmp_path / "out" / "failures").iterdir()
    record.write_text('{"exit_code": "2"')
    assert [cell.error for cell in read_comparison(plan, folder).failures] == [
        f"the record of how it ended is damaged: {record}"
    ]


@pytest.mark.parametrize(
    ("metrics", "told"),
    [
        (lambda lines: [*lines[:2], '{"step": 2, "eval', *lines[3:]], "1 line(s) of metrics.jsonl cannot be read"),
        (lambda lines: lines[:3], "metrics.jsonl has no figures of 2 of 4 trainer steps."),
        (lambda lines: [], "metrics.jsonl has no figures of 4 of 4 trainer steps."),
    ],
)
def test_what_is_missing_from_a_cells_files_is_told_wherever_its_figures_are(tmp_path, metrics, told):
    plan, folder, _ = compare(tmp_path, FakeTrainer())
    path = folder.run_dir(plan.cells[-1]) / "metrics.jsonl"
    path.write_text("".join(f"{line}\n" for line in metrics(path.read_text().splitlines())))
    printed = io.StringIO()
    write_results(plan, folder, Console(file=printed, width=200))
    note = f"damaged: brace, S = 2, seed 1: {told}"
    for text in (printed.getvalue(), *((folder.out / name).read_text() for name in ("table.md", "compare.html"))):
        assert note in text
        assert "2 of 2, 1 damaged" in text
    results = json.loads((folder.out / "results.json").read_text())
    assert [bool(cell["damage"]) for cell in results["cells"]] == [False, False, False, True]
    assert any(told in sentence for sentence in results["cells"][-1]["damage"])


def test_a_process_ended_by_a_signal_says_so(tmp_path):
    plan, folder = plan_for(tmp_path), folder_for(tmp_path)
    assert folder.settle_cell(plan.cells[0], -9) == (-9, "ended by SIGKILL, as when memory runs out")
    assert folder.settle_cell(plan.cells[0], 1) == (1, "ended with exit code 1 and without a word")
