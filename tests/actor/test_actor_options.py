"""Options of the rules: equal to the rules' signatures, torch-free, and refusing what cannot be meant."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from brace_rl.actor import RULES, SELECTORS
from brace_rl.actor.options import RULE_OPTIONS, rule_options
from brace_rl.actor.weight_average import ACTIVE_FRACTION
from brace_rl.errors import ConfigError

REQUIRED = {
    "estr": {"tau": 0.3},
    "ppo_ewma": {"beta": 0.9},
    "ppo_ewma_revised": {"low": 0.5, "high": 2.0},
}
"""What was never published, per rule."""

every_rule = pytest.mark.parametrize("rule", list(RULES))


def keywords(function) -> dict[str, object]:
    """Keyword-only arguments with their defaults."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}


@every_rule
def test_options_are_the_arguments_of_the_rule_with_the_same_defaults(rule):
    options = RULE_OPTIONS[rule]
    trainers = options.trainer_settings | {"rule"}
    fields = {name: field for name, field in options.model_fields.items() if name not in trainers}
    arguments = keywords(RULES[rule])
    assert set(fields) == set(arguments)
    for name, field in fields.items():
        assert field.is_required() == (arguments[name] is inspect.Parameter.empty), name
        if not field.is_required():
            assert field.default == arguments[name], name
    if rule in SELECTORS:
        assert keywords(SELECTORS[rule]) == arguments
    made = options(**REQUIRED.get(rule, {}))
    assert set(made.rule_arguments()) == set(arguments)


def test_every_rule_has_options_that_bear_its_name():
    assert list(RULE_OPTIONS) == list(RULES)
    for rule, options in RULE_OPTIONS.items():
        assert rule_options(rule) is options
        assert options(**REQUIRED.get(rule, {})).rule == rule
        with pytest.raises(ValidationError):
            options(**REQUIRED.get(rule, {}), rule="another")
    with pytest.raises(ConfigError, match=r"actor\.rule: no rule 'icepopp'; did you mean icepop\?"):
        rule_options("icepopp")


@every_rule
def test_what_was_never_published_must_be_given_and_nothing_else(rule):
    options = RULE_OPTIONS[rule]
    assert {name for name, field in options.model_fields.items() if field.is_required()} == set(REQUIRED.get(rule, {}))
    for name in REQUIRED.get(rule, {}):
        with pytest.raises(ValidationError, match=f"{name}\n  Field required"):
            options(**{key: value for key, value in REQUIRED[rule].items() if key != name})


@every_rule
def test_options_are_described_frozen_and_know_no_other_key(rule):
    options = RULE_OPTIONS[rule]
    assert options.__doc__
    assert all(field.description for field in options.model_fields.values())
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        options(**REQUIRED.get(rule, {}), typo=1)
    made = options(**REQUIRED.get(rule, {}))
    with pytest.raises(ValidationError, match="frozen"):
        made.rule = rule


@pytest.mark.parametrize(
    ("rule", "options"),
    [
        ("ppo", {"clip_low": 0.0}),
        ("ppo", {"clip_low": 1.5}),
        ("ppo", {"dual_clip": 1.0}),
        ("ppo", {"edge": "B"}),
        ("decoupled", {"weight_cap": 0.0}),
        ("ppo_ewma", {"beta": 1.0}),
        ("ppo_ewma_revised", {"low": 2.0, "high": 1.0}),
        ("ppo_ewma_revised", {"low": 0.5, "high": float("inf")}),
        ("icepop", {"low": 6.0}),
        ("icepop", {"edge": "U"}),
        ("estr", {"tau": 0.0}),
        ("dis", {"eps_low": 1.1}),
        ("tis", {"level": "row"}),
        ("m2po", {"tau": 0.0}),
    ],
)
def test_options_out_of_range_are_refused_before_torch_is_loaded(rule, options):
    with pytest.raises(ValidationError):
        RULE_OPTIONS[rule](**options)


def test_needs_follow_the_edge():
    def needs(rule: str, **options) -> set[str]:
        made = RULE_OPTIONS[rule](**options)
        names = ("behavior", "proximal", "entropy", "version_lag", "weight_average")
        return {name for name in names if getattr(made, f"needs_{name}")}

    assert needs("ppo") == {"behavior"}
    assert needs("ppo", edge="U") == {"proximal"}
    assert needs("decoupled") == needs("tis") == needs("icepop") == needs("kpop") == {"behavior", "proximal"}
    assert needs("icepop", edge="E") == needs("m2po") == needs("gspo") == needs("cispo") == needs("dis") == {"behavior"}
    assert needs("a3po") == {"behavior", "version_lag"}
    assert needs("estr", tau=1.0) == {"behavior", "entropy"}
    assert needs("ppo_ewma", beta=0.9) == {"behavior", "proximal", "weight_average"}
    assert needs("ppo_ewma_revised", low=0.5, high=2.0) == {"behavior", "proximal", "weight_average"}


def test_the_reset_threshold_is_the_one_of_the_weight_average():
    assert RULE_OPTIONS["ppo_ewma_revised"].model_fields["reset_below"].default == ACTIVE_FRACTION


def test_options_load_no_torch():
    code = "import sys, brace_rl.actor.options; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_page_about_the_rules_has_a_row_for_each_with_its_sources():
    page = (Path(__file__).parents[2] / "docs" / "actor_rules.md").read_text()
    rows = {row.split("|")[1].strip(): row for row in page.splitlines() if row.startswith("| `")}
    assert list(rows) == [f"`{rule}`" for rule in RULES]
    for rule, function in RULES.items():
        row = rows[f"`{rule}`"]
        assert f"`brace_rl.actor.{rule}`" in row
        assert set(re.findall(r"\d{4}\.\d{5}", row)) <= set(re.findall(r"\d{4}\.\d{5}", function.__doc__ or "")), rule
        for name, default in keywords(function).items():
            if default is not inspect.Parameter.empty and isinstance(default, float) and "clip" not in name:
                assert f"{default:g}" in row, (rule, name)


@pytest.mark.parametrize(("rule", "key"), [("estr", "tau"), ("ppo_ewma_revised", "beta")])
def test_true_is_no_number_where_the_option_may_be_left_out_either(rule, key):
    with pytest.raises(ValidationError, match="input should be a number"):
        RULE_OPTIONS[rule](**REQUIRED[rule] | {key: True})
