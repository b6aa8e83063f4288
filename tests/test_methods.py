"""Methods as settings: what each is made of, what it says of itself, and that the documents say the same."""

import json
import re
from pathlib import Path

import pytest

from brace_rl.actor.options import RULE_OPTIONS
from brace_rl.config import AlgorithmConfig, load_config
from brace_rl.errors import ConfigError
from brace_rl.methods import METHODS, UNPUBLISHED, method_settings, own_settings

DOCUMENT = (Path(__file__).parents[1] / "docs" / "methods.md").read_text(encoding="utf-8")
CHOICES = ("algorithm.value_target", "algorithm.advantage", "actor.rule")
SAID_BESIDE_THE_TABLE = "algorithm.whiten_advantages"


def table(heading):
    """Cells of every row of the tables below a heading of the document."""
    section = DOCUMENT.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:3] == "| `"]


def settings_of(method):
    return {f"{s}.{key}": value for s, keys in method_settings(method).items() for key, value in keys.items()}


@pytest.mark.parametrize("name", METHODS)
def test_every_method_says_where_it_departs_from_its_source(name):
    text = METHODS[name].__doc__
    assert "Departs" in text or "ours" in text.splitlines()[0]


@pytest.mark.parametrize(
    ("name", "departures"),
    [
        ("areal", ["5 are masked", "critic is\n    PPO's"]),
        ("a3po", ["5 are masked", "no cap", "critic is PPO's"]),
        ("ppo_ewma_original", ["beta = 0.8", "0.20 / 0.28", "0.2 on both sides", "critic is PPO's"]),
        ("ppo_ewma", ["0.5 to 2", "critic is PPO's"]),
        ("dis", ["critic is PPO's", "whitened"]),
        ("estr", ["tau = 1.0", "eps = 0.01", "critic is PPO's"]),
        ("sao", ["not published", "hitened"]),
        ("vapo", ["that half", "whitened"]),
    ],
)
def test_a_methods_departures_are_listed(name, departures):
    assert [text for text in departures if text not in METHODS[name].__doc__] == []


@pytest.mark.parametrize("name", METHODS)
def test_a_method_is_made_of_all_it_sets_but_its_rules_constants(name):
    own = own_settings(name)
    assert set(CHOICES) <= set(own)
    free = {key: value for key, value in settings_of(name).items() if key not in own}
    assert free == {f"actor.{key}": value for key, value in UNPUBLISHED.get(own["actor.rule"], {}).items()}


def test_the_table_of_presets_is_what_they_set():
    rows = {row[0].strip("`"): row[1:] for row in table("Presets")}
    assert list(rows) == list(METHODS)
    for name, (target, advantage, rule, besides, departs, source) in rows.items():
        settings = settings_of(name)
        assert [cell.strip("`") for cell in (target, advantage, rule)] == [settings.pop(key) for key in CHOICES]
        assert settings.pop(SAID_BESIDE_THE_TABLE) is (target != "`none`")
        assert set(re.findall("`([^`]*)`", besides)) == {f"{k} = {json.dumps(v)}" for k, v in settings.items()}, name
        assert departs
        assert all(number in METHODS[name].__doc__ for number in re.findall(r"\d{4}\.\d{5}", source))


def test_every_choice_and_every_setting_of_a_recipe_is_explained():
    def choices(field):
        return [str(x) for x in re.findall(r"'(\w+)'", str(AlgorithmConfig.model_fields[field].annotation))]

    assert [row[0].strip("`") for row in table("Value targets")] == choices("value_target")
    assert [row[0].strip("`") for row in table("Advantages")] == choices("advantage")
    settings = [*AlgorithmConfig.model_fields, "critic_warmup_steps", "critic_warmup_until", "critic_updates"]
    settings += ["freeze_critic_attention", "lr_reference_staleness", "lr_ess_scaling", "lr_warmup_steps"]
    unexplained = [name for name in settings if not re.search(rf"\b{name}\b", DOCUMENT)]
    assert unexplained == []


def test_actor_rules_of_presets_exist():
    assert {own_settings(name)["actor.rule"] for name in METHODS} <= set(RULE_OPTIONS)


def test_value_pre_training_that_would_never_begin_is_refused():
    with pytest.raises(ConfigError, match=r"optim\.critic_warmup_until: .*critic_warmup_steps = 0 is none") as caught:
        load_config(None, {"optim.critic_warmup_steps": "0"}, method="vapo")
    assert "\n" not in str(caught.value)
    assert load_config(None, {"optim.critic_warmup_steps": "1"}, method="vapo").optim.critic_warmup_until == 0.5
