"""Which cells a comparison has, and what is refused before any of them starts."""

import pytest
from compare_parts import RECIPE, plan_for

from brace_rl.compare.plan import METHOD_KEYS, identity
from brace_rl.errors import ConfigError
from brace_rl.methods import METHODS, method_settings


def test_cells_are_every_method_at_every_staleness_with_every_seed_whole_seeds_first(tmp_path):
    plan = plan_for(tmp_path, staleness=[0, 2])
    assert [(c.seed, c.staleness, c.method) for c in plan.cells] == [
        (seed, s, method) for seed in (0, 1) for s in (0, 2) for method in ("ppo", "brace")
    ]
    assert len({cell.name for cell in plan.cells}) == 8


def test_cells_of_a_seed_share_everything_but_method_and_staleness(tmp_path):
    cells = [c for c in plan_for(tmp_path, methods=list(METHODS)[:9], staleness=[0, 2]).cells if c.seed == 1]
    shared = []
    for cell in cells:
        settings = cell.config.model_dump(mode="json", exclude={"algorithm", "actor"})
        del settings["run"]["name"], settings["schedule"]["max_staleness"]
        shared.append(settings)
    assert all(settings == shared[0] for settings in shared)
    assert shared[0]["run"]["seed"] == 1
    assert shared[0]["schedule"]["mode"] == "lag"


def test_one_warm_start_per_seed_is_the_model_of_all_its_cells(tmp_path):
    plan = plan_for(tmp_path, staleness=[0, 2])
    assert [start.seed for start in plan.starts] == [0, 1]
    names = {start.seed: start.name for start in plan.starts}
    for cell in plan.cells:
        assert cell.config.model.path == str(tmp_path / "out" / "starts" / names[cell.seed])
        assert cell.config.warm_start.steps == 0


def test_a_model_used_as_it_is_needs_no_warm_start(tmp_path):
    plan = plan_for(tmp_path, RECIPE.replace("steps = 2", "steps = 0") + '[model]\npath = "some/model"\n')
    assert plan.starts == []
    assert {cell.config.model.path for cell in plan.cells} == {"some/model"}


def test_a_model_of_random_weights_is_made_once_too(tmp_path):
    plan = plan_for(tmp_path, RECIPE.replace("steps = 2", "steps = 0"))
    assert len(plan.starts) == 2


def test_a_warm_start_is_used_again_whatever_comes_after_it(tmp_path):
    names = [
        {start.name for start in plan_for(tmp_path, **changed).starts}
        for changed in (
            {},
            {"methods": ["kpop"]},
            {"staleness": [7]},
            {"overrides": {"optim.actor_lr": "1e-5", "eval.every": "1"}},
            {"overrides": {"warm_start.steps": "3"}},
        )
    ]
    assert names[0] == names[1] == names[2] == names[3]
    assert names[0].isdisjoint(names[4])


@pytest.mark.parametrize("override", [{"optim.actor_lr": "1e-5"}, {"warm_start.steps": "3"}, {"eval.problems": "7"}])
def test_another_setting_is_another_cell(tmp_path, override):
    names = {cell.name for cell in plan_for(tmp_path).cells}
    assert names.isdisjoint(cell.name for cell in plan_for(tmp_path, overrides=override).cells)


def test_a_default_said_aloud_is_the_same_cell(tmp_path):
    """So that a setting which is added later, with its default, does not orphan what was run before it."""
    names = {cell.name for cell in plan_for(tmp_path).cells}
    said = {"rollout.temperature": "1.0", "optim.minibatches": "1", "algorithm.gamma": "1.0"}
    assert {cell.name for cell in plan_for(tmp_path, overrides=said).cells} == names


def test_places_are_not_part_of_a_cells_identity(tmp_path):
    config = plan_for(tmp_path).cells[0].config
    moved = config.model_copy(update={"run": config.run.model_copy(update={"root": "elsewhere", "name": "x"})})
    assert identity(moved) == identity(config)


def test_an_unknown_method_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match=r"method 'bracee': unknown; did you mean brace\?"):
        plan_for(tmp_path, methods=["ppo", "bracee"])


def test_methods_that_compare_a_prompts_responses_say_what_they_need(tmp_path):
    with pytest.raises(ConfigError, match=r"method grpo, S = 2: .*rollout.samples_per_prompt.* set it to 2 or more"):
        plan_for(tmp_path, methods=["ppo", "grpo"])


def test_methods_with_another_budget_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"method sao: rollout.samples_per_prompt is 1 and that of ppo is 4"):
        plan_for(tmp_path, RECIPE.replace("[rollout]", "[rollout]\nsamples_per_prompt = 4"), methods=["ppo", "sao"])


def test_a_setting_for_all_mends_another_budget(tmp_path):
    plan = plan_for(tmp_path, methods=["ppo", "sao"], overrides={"rollout.samples_per_prompt": "2"})
    assert {cell.config.rollout.samples_per_prompt for cell in plan.cells} == {2}


@pytest.mark.parametrize("key", ["run.seed", "schedule.max_staleness", "run.name", "run.root"])
def test_what_a_comparison_varies_itself_cannot_be_set(tmp_path, key):
    with pytest.raises(ConfigError, match=f"--{key}: a comparison sets it itself; use --"):
        plan_for(tmp_path, overrides={key: "1"})


def test_a_setting_that_one_method_does_not_have_is_refused_with_its_name(tmp_path):
    with pytest.raises(ConfigError, match=r"method ppo, S = 2: .*actor.phi"):
        plan_for(tmp_path, methods=["kpop", "ppo"], overrides={"actor.phi": "1.0"})


def test_a_setting_of_the_methods_own_reaches_them_and_not_the_warm_start(tmp_path):
    plan = plan_for(tmp_path, methods=["kpop"], overrides={"actor.phi": "1.0"})
    assert plan.cells[0].config.actor.phi == 1.0
    assert "actor.phi" not in plan.starts[0].settings


def test_no_method_sets_more_than_a_method_may(tmp_path):
    """Anything else would be another budget and be refused; sao's one response per prompt is, see above."""
    for name in METHODS:
        for section, table in method_settings(name).items():
            if section not in ("algorithm", "actor"):
                assert set(table) <= {*METHOD_KEYS.get(section, ()), "samples_per_prompt"}
