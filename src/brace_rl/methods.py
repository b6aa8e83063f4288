"""Methods by name: the settings that make a recipe into one of the methods of the comparison. Torch-free.

A method sets the critic's target, the advantage and the actor's rule, and leaves task, model, budget and learning rates
to the recipe. ``brace+RULE`` joins the BRACE critic with any actor rule. Constants that were never published are ours,
and said to be in the docstring of the method; set them as any other (``--actor.tau 0.5``). Every method that clips does
so at 0.20 / 0.28, the clips of the BRACE comparison, whatever its source has.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from brace_rl.actor.options import RULE_OPTIONS
from brace_rl.errors import ConfigError
from brace_rl.section import did_you_mean

Settings = dict[str, dict[str, Any]]
"""Section -> key -> value. The table ``actor`` stands for the whole section, any other for the keys it names."""

PPO_CRITIC: dict[str, Any] = {"value_target": "monte_carlo", "advantage": "eq27", "whiten_advantages": True}
"""PPO at gamma = lambda = 1: the critic is fitted to the return, the advantage is return less value."""

UNPUBLISHED: Mapping[str, Mapping[str, Any]] = {
    "estr": {"tau": 1.0},
    "ppo_ewma": {"beta": 0.8},
    "ppo_ewma_revised": {"low": 0.5, "high": 2.0},
}
"""Constants no source gives, chosen by us and not tuned."""


def ppo() -> Settings:
    """PPO (arXiv 1707.06347) with asymmetric clips 0.20 / 0.28 on target/behavior, as BRACE's baseline (2609.09783).

    Departs: no KL penalty and no entropy bonus, as in that comparison.
    """
    return {"algorithm": dict(PPO_CRITIC), "actor": {"rule": "ppo"}}


def areal() -> Settings:
    """AReaL's decoupled PPO (arXiv 2505.24298): clip around the weights before the update, weight proximal/behavior.

    Departs: behaviour weights above 5 are masked as in the present code, where the paper has no cap. The critic is
    PPO's.
    """
    return {"algorithm": dict(PPO_CRITIC), "actor": {"rule": "decoupled"}}


def a3po() -> Settings:
    """A-3PO (arXiv 2512.06547): AReaL's objective with a proximal policy interpolated by version lag.

    Departs: behaviour weights above 5 are masked as in :func:`areal`, where the paper has no cap. The critic is PPO's.
    """
    return {"algorithm": dict(PPO_CRITIC), "actor": {"rule": "a3po"}}


def ppo_ewma() -> Settings:
    """Revised PPO-EWMA (arXiv 2605.12070), the form BRACE is compared with: an average of weights as proximal policy.

    Departs: the band of proximal/behavior that is kept, 0.5 to 2, is ours; no source gives it. What counts as an active
    token (neither rejected nor clipped) is our reading. The critic is PPO's.
    """
    return _critic_of_ppo("ppo_ewma_revised")


def ppo_ewma_original() -> Settings:
    """PPO-EWMA (arXiv 2110.00641): clip around an average of weights, with weights proximal/behavior.

    Departs: beta = 0.8 per optimiser step is ours; the source has no default. The clip is 0.20 / 0.28, where the source
    has 0.2 on both sides. The critic is PPO's.
    """
    return _critic_of_ppo("ppo_ewma")


def icepop() -> Settings:
    """IcePop (Ring-1T, arXiv 2510.18855): weight proximal/behavior inside 0.5 .. 5, nothing outside, then PPO's clip.

    Departs: a critic, which BRACE's comparison gives every method.
    """
    return _critic_of_ppo("icepop")


def kpop() -> Settings:
    """KPop (Ring-2.6 report): mask where the Bernoulli KL of the sampled token exceeds phi = 2.0 in either direction.

    Departs: phi is what AReaL ships; 0.1 to 2.0 were published as tries. The critic is PPO's.
    """
    return _critic_of_ppo("kpop")


def dis() -> Settings:
    """Direct double-sided importance sampling (GLM-5, arXiv 2602.15763) with its bounds for mathematics, 0.3 / 5.0.

    Departs: the critic is PPO's and its advantages are whitened, where the source has no critic.
    """
    return _critic_of_ppo("dis")


def estr() -> Settings:
    """Entropy-scaled trust region (arXiv 2607.22186) on target/behavior.

    Departs: tau = 1.0 is ours, not published; eps = 0.01 is from secondary notes. The critic is PPO's.
    """
    return _critic_of_ppo("estr")


def sao() -> Settings:
    """SAO (arXiv 2607.07508): DIS, one response per prompt, two critic steps per actor step, frozen critic attention.

    The critic's lambda is 1, the policy's ``1 - 1/(1.5 l)``; both skip tool output, as every estimator here does.
    Departs: the size of its value pre-training is not published; the recipe's ``optim.critic_warmup_steps`` stands. Its
    learning rates (1e-6, 5e-6) are left to the recipe. Advantages are whitened.
    """
    return {
        "algorithm": PPO_CRITIC | {"advantage": "gae", "policy_lam_alpha": 1.5},
        "actor": {"rule": "dis"},
        "rollout": {"samples_per_prompt": 1},
        "optim": {"critic_updates": 2, "freeze_critic_attention": True},
    }


def vapo() -> Settings:
    """VAPO (arXiv 2504.05118): lambda 1 for the critic, ``1 - 1/(0.05 l)`` for the policy, value pre-training.

    Pre-training ends with the first batch of which the critic explains half of the variance, or after
    ``optim.critic_warmup_steps``. Departs: that half, and one batch for "settled", are ours; advantages are whitened;
    the imitation loss on right answers and group sampling are left out.
    """
    return {
        "algorithm": PPO_CRITIC | {"advantage": "gae", "policy_lam_alpha": 0.05},
        "actor": {"rule": "ppo"},
        "optim": {"critic_warmup_until": 0.5},
    }


def grpo() -> Settings:
    """GRPO (arXiv 2402.03300): reward against the prompt's group, divided by its deviation; no critic.

    Needs ``rollout.samples_per_prompt`` of 2 or more. Departs: no KL penalty; the loss is a mean over all tokens of the
    batch, where the paper takes a mean over each response first.
    """
    return _critic_free("group")


def dr_grpo() -> Settings:
    """Dr. GRPO (arXiv 2503.20783): GRPO without the deviation.

    Departs: divided by the batch's tokens, where the source divides by a constant.
    """
    return _critic_free("dr_grpo")


def rloo() -> Settings:
    """RLOO (arXiv 2402.14740): reward less the mean of the prompt's other responses; no critic.

    Departs: PPO's clip on tokens, where the source has none; no KL penalty.
    """
    return _critic_free("rloo")


def group_brace() -> Settings:
    """BRACE without a critic, ours: ``Pi_k(s+1) (R - group mean)``, a windowed suffix weight on a group's advantage."""
    return _critic_free("group_brace")


def brace() -> Settings:
    """BRACE (arXiv 2609.09783): corrected critic target, Eq. 27 advantage, PPO's clip on target/behavior.

    Departs in nothing.
    """
    return {
        "algorithm": {"value_target": "brace", "advantage": "eq27", "whiten_advantages": True},
        "actor": {"rule": "ppo"},
    }


METHODS: Mapping[str, Callable[[], Settings]] = {
    method.__name__: method
    for method in (
        ppo,
        areal,
        a3po,
        ppo_ewma,
        ppo_ewma_original,
        icepop,
        kpop,
        dis,
        estr,
        sao,
        vapo,
        grpo,
        dr_grpo,
        rloo,
        group_brace,
        brace,
    )
}
"""Name -> method; ``brace+RULE`` is understood besides, for every rule of :mod:`brace_rl.actor.options`.

A rule may bear the name of a method that has another one: ``brace+ppo_ewma`` has the rule of ``ppo_ewma_original``."""


def method_settings(name: str) -> Settings:
    """The settings of a method.

    Raises:
        ConfigError: there is no such method.
    """
    if name in METHODS:
        return METHODS[name]()
    base, joined, rule = name.partition("+")
    if joined and base == "brace" and rule in RULE_OPTIONS:
        return brace() | {"actor": _rule(rule)}
    joint = [f"brace+{rule}" for rule in RULE_OPTIONS]
    raise ConfigError(f"method {name!r}: unknown{did_you_mean(name, [*METHODS, *joint])}")


def own_settings(name: str) -> dict[str, Any]:
    """``section.key`` -> value of what makes a method: without these it would be another one under its name.

    The constants of its actor rule are left out; they may be set to what one likes.

    Raises:
        ConfigError: there is no such method.
    """
    return {
        f"{section}.{key}": value
        for section, table in method_settings(name).items()
        for key, value in table.items()
        if section != "actor" or key == "rule"
    }


def with_method(recipe: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The tables of a recipe with those of a method laid over them.

    Raises:
        ConfigError: there is no such method.
    """
    merged = {section: dict(table) if isinstance(table, Mapping) else table for section, table in recipe.items()}
    for section, table in method_settings(name).items():
        own = merged.get(section)
        keep = section != "actor" and isinstance(own, Mapping)
        merged[section] = {**own, **table} if keep and own is not None else dict(table)
    return merged


def described() -> list[tuple[str, str]]:
    """Name and docstring of every method, for people to read."""
    named = [(name, inspect.cleandoc(method.__doc__ or "")) for name, method in METHODS.items()]
    joined = (
        f"BRACE's critic with an actor rule of: {', '.join(RULE_OPTIONS)}. Rules, not methods: brace+decoupled has the "
        "rule of the method areal, brace+ppo_ewma_revised that of ppo_ewma."
    )
    return [*named, ("brace+RULE", joined)]


def _rule(name: str) -> dict[str, Any]:
    return {"rule": name, **UNPUBLISHED.get(name, {})}


def _critic_of_ppo(rule: str) -> Settings:
    return {"algorithm": dict(PPO_CRITIC), "actor": _rule(rule)}


def _critic_free(advantage: str) -> Settings:
    return {
        "algorithm": {"value_target": "none", "advantage": advantage, "whiten_advantages": False},
        "actor": {"rule": "ppo"},
    }
