"""Which cells a comparison has, and what is refused before any of them starts."""

import re

import pytest
from compare_parts import RECIPE, plan_for

from brace_rl.compare.plan import actor_steps, identity, method_parts
from brace_rl.compare.variants import METHOD_KEYS, parse_variant
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
    text = RECIPE.replace("[rollout]", "[rollout]\nsamples_per_prompt = 4")
    plan = plan_for(tmp_path, text, methods=["ppo", "sao"], overrides={"rollout.samples_per_prompt": "1"})
    assert {cell.config.rollout.samples_per_prompt for cell in plan.cells} == {1}


@pytest.mark.parametrize(
    ("methods", "key", "value", "refused"),
    [
        (["ppo", "brace"], "algorithm.value_target", "brace", "ppo sets algorithm.value_target = monte_carlo"),
        (["ppo", "icepop"], "actor.rule", "ppo", "icepop sets actor.rule = icepop"),
        (["ppo", "sao"], "optim.critic_updates", "1", "sao sets optim.critic_updates = 2"),
        (["ppo", "sao"], "rollout.samples_per_prompt", "2", "sao sets rollout.samples_per_prompt = 1"),
        (["brace:window=20", "ppo"], "algorithm.window", "5", "brace:window=20 sets algorithm.window = 20"),
    ],
)
def test_a_setting_for_all_cannot_take_away_what_makes_a_method(tmp_path, methods, key, value, refused):
    with pytest.raises(ConfigError) as caught:
        plan_for(tmp_path, methods=methods, overrides={key: value})
    assert str(caught.value).startswith(f"--{key} {value}: method {refused} itself")
    assert "\n" not in str(caught.value)


def test_two_methods_that_are_one_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"^method brace:window=100: every setting is that of brace; leave one"):
        plan_for(tmp_path, methods=["ppo", "brace", "brace:window=100"])


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


@pytest.mark.parametrize(
    ("text", "method", "settings"),
    [
        ("estr:tau=0.5", "estr", {"actor.tau": "0.5"}),
        ("brace:window=20", "brace", {"algorithm.window": "20"}),
        ("brace+icepop:high=3:window=20", "brace+icepop", {"actor.high": "3", "algorithm.window": "20"}),
        ("icepop:actor.low=0.1", "icepop", {"actor.low": "0.1"}),
        ("ppo:optim.lr_ess_scaling=true", "ppo", {"optim.lr_ess_scaling": "true"}),
        (" grpo ", "grpo", {}),
    ],
)
def test_a_key_of_a_variant_is_the_rules_then_the_algorithms_or_written_out(text, method, settings):
    variant = parse_variant(text)
    assert (variant.name, variant.method, variant.settings) == (text.strip(), method, settings)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("brace:windw=20", "no setting 'windw'; did you mean window?"),
        ("ppo:tau=0.5", "no setting 'tau'; "),
        ("brace:optim.actor_lrr=1", "no setting 'optim.actor_lrr'; did you mean optim.actor_lr?"),
        ("brace:actor.window=20", "no setting 'actor.window'; did you mean"),
        ("brace:window", "'window' is not KEY=VALUE"),
        ("brace:window=", "'window=' is not KEY=VALUE"),
        ("brace:", "'' is not KEY=VALUE"),
        ("brace:window=20:algorithm.window=30", "algorithm.window is given twice"),
        ("brace:value_target=vtrace", "algorithm.value_target = brace is part of what brace is"),
        ("ppo:rule=icepop", "actor.rule = ppo is part of what ppo is"),
        ("sao:optim.critic_updates=1", "optim.critic_updates = 2 is part of what sao is"),
        ("brace:optim.steps=9", "optim.steps is the same for all methods of a comparison; give it as --optim.steps"),
        ("brace:run.seed=9", "run.seed is the same for all"),
        ("bracee:window=20", "unknown; did you mean brace?"),
    ],
)
def test_a_variant_that_cannot_be_meant_is_one_line(text, message):
    with pytest.raises(ConfigError) as caught:
        parse_variant(text)
    assert message in str(caught.value)
    assert str(caught.value).startswith("method ")
    assert "\n" not in str(caught.value)


def test_a_variant_is_a_row_of_its_own_with_its_settings_alone(tmp_path):
    rows = ["estr", "estr:tau=0.5", "brace:window=20"]
    plan = plan_for(tmp_path, methods=rows, seeds=[0], overrides={"algorithm.gamma": "0.99"})
    assert (plan.methods, [cell.method for cell in plan.cells]) == (rows, rows)
    assert [cell.base for cell in plan.cells] == ["estr", "estr", "brace"]
    assert [getattr(cell.config.actor, "tau", None) for cell in plan.cells] == [1.0, 0.5, None]
    assert [cell.config.algorithm.window for cell in plan.cells] == [100, 100, 20]
    assert {cell.config.algorithm.gamma for cell in plan.cells} == {0.99}
    assert all(re.fullmatch(r"[A-Za-z0-9+._-]+", cell.name) for cell in plan.cells)
    assert len({cell.name for cell in plan.cells}) == 3
    plain = plan_for(tmp_path, methods=["estr"], seeds=[0], overrides={"algorithm.gamma": "0.99"})
    assert plain.cells[0].name == plan.cells[0].name


def test_no_text_of_a_variant_leaves_its_folder(tmp_path):
    name = parse_variant(f"brace:window=../../{'x' * 300}").stem
    assert re.fullmatch(r"[A-Za-z0-9+._-]+", name)
    assert (len(name), name.startswith("brace.window-.._.._xxx")) == (80, True)


def test_a_variant_with_an_impossible_value_is_refused_by_its_name(tmp_path):
    with pytest.raises(ConfigError, match=r"^method estr:tau=-1, S = 2: .*actor\.tau: input should be greater than 0"):
        plan_for(tmp_path, methods=["ppo", "estr:tau=-1"])


def test_what_a_variant_may_set_is_told_with_the_method(tmp_path):
    plan = plan_for(tmp_path, methods=["ppo", "ppo:optim.actor_lr=0.5", "estr:tau=0.5"], seeds=[0])
    parts = [method_parts(cell.config) for cell in plan.cells]
    assert [part["optim"]["actor_lr"] for part in parts] == [1e-6, 0.5, 1e-6]
    assert parts[2]["actor"]["tau"] == 0.5


def test_steps_that_train_the_actor_are_those_after_the_warm_up_of_a_critic(tmp_path):
    overrides = {"rollout.samples_per_prompt": "2", "optim.critic_warmup_steps": "3"}
    plan = plan_for(tmp_path, methods=["ppo", "grpo", "vapo"], seeds=[0], overrides=overrides)
    assert [actor_steps(cell.config) for cell in plan.cells] == ["1", "4", "1 to 3"]


def test_a_recipe_that_ends_value_pre_training_early_can_be_warm_started(tmp_path):
    plan = plan_for(
        tmp_path, RECIPE.replace("critic_warmup_steps = 1", "critic_warmup_steps = 1\ncritic_warmup_until = 0.5")
    )
    assert {cell.config.optim.critic_warmup_until for cell in plan.cells} == {0.5}


def test_no_method_sets_more_than_a_method_may(tmp_path):
    """Anything else would be another budget and be refused; sao's one response per prompt is, see above."""
    for name in METHODS:
        for section, table in method_settings(name).items():
            if section not in ("algorithm", "actor"):
                assert set(table) <= {*METHOD_KEYS.get(section, ()), "samples_per_prompt"}
