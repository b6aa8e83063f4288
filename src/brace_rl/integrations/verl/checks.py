"""What in a verl configuration keeps BRACE from working, without importing verl.

The trainers refuse to start on an error, with the same words as ``brace doctor verl``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from brace_rl.errors import ConfigError
from brace_rl.integrations.checking import entry, window_findings
from brace_rl.integrations.finding import Finding
from brace_rl.integrations.token_level import TokenLevelOptions
from brace_rl.integrations.verl.options import NODE, options_from_algorithm
from brace_rl.integrations.verl.versions import Route

TRAINERS = {
    "brace_sync": ("PPOTrainerSync", "sync"),
    "brace_colocate_async": ("PPOTrainerColocateAsync", "colocate_async"),
    "brace_separate_async": ("PPOTrainerSeparateAsync", "separate_async"),
}
"""Name -> verl's class that it builds on, and verl's name of that."""

ROLLOUT = "actor_rollout_ref.rollout"

WHOLE_DISTRIBUTION = {"top_p": (1.0,), "top_k": (-1, 0)}
"""Sampling setting -> values that cut nothing off, the usual one first."""


def config_findings(config: Mapping[str, Any], *, route: Route = "trainers") -> list[Finding]:
    """Findings about a verl configuration as nested mappings; what is missing counts as verl's default."""
    if route == "trainers":
        found = list(_trainer_findings(config))
    else:
        found = list(_node_findings(config))
    try:
        options = options_from_algorithm(entry(config, "algorithm", {}))
    except ConfigError as error:
        return [*found, Finding("error", str(error), "see docs/verl.md for the options")]
    found += [*_critic_findings(config), *_ratio_findings(config, options, route)]
    return [*found, *window_findings(options, lam="algorithm.lam", window=f"{NODE}.window")]


def _trainer_findings(config: Mapping[str, Any]) -> Iterator[Finding]:
    mode = entry(config, "trainer.v1.trainer_mode", "sync")
    if not entry(config, "trainer.use_v1", True):
        yield Finding(
            "error", "trainer.use_v1 = False: the old trainers know no brace_* trainer", "set trainer.use_v1=True"
        )
    ours = {verl_mode: name for name, (_, verl_mode) in TRAINERS.items()}
    if mode in ours:
        yield Finding(
            "warning",
            f"trainer.v1.trainer_mode = {mode}: verl's own trainer, BRACE is not in use",
            f"set trainer.v1.trainer_mode={ours[mode]}",
        )
    elif mode not in TRAINERS:
        yield Finding(
            "error",
            f"trainer.v1.trainer_mode = {mode}: no such trainer",
            f"set trainer.v1.trainer_mode to one of {', '.join(TRAINERS)}",
        )
    for name, (_, verl_mode) in TRAINERS.items():
        if entry(config, f"trainer.v1.{name}", None):
            yield Finding(
                "error",
                f"trainer.v1.{name}: settings that nobody reads; {name} takes those of trainer.v1.{verl_mode}",
                f"move them to trainer.v1.{verl_mode}",
            )


def _node_findings(config: Mapping[str, Any]) -> Iterator[Finding]:
    if entry(config, NODE, None) is None:
        yield Finding("warning", f"{NODE}: not there, so BRACE is not in use", f"add it: +{NODE}.window=100")


def _critic_findings(config: Mapping[str, Any]) -> Iterator[Finding]:
    estimator = entry(config, "algorithm.adv_estimator", "gae")
    if estimator != "gae":
        yield Finding(
            "error",
            f"algorithm.adv_estimator = {estimator}: BRACE takes its place, and verl keeps its critic on for gae only",
            "set algorithm.adv_estimator=gae",
        )
    if entry(config, "critic.enable", None) is False:
        yield Finding(
            "error", "critic.enable = False: there is no critic whose target to correct", "set critic.enable=True"
        )
    if entry(config, "algorithm.use_pf_ppo", False):
        yield Finding(
            "error",
            "algorithm.use_pf_ppo = True: it draws the batch anew after the advantages, with their old targets",
            "set algorithm.use_pf_ppo=False",
        )


def _ratio_findings(config: Mapping[str, Any], options: TokenLevelOptions, route: Route) -> Iterator[Finding]:
    if not options.needs_ratios:
        return
    # On by default since verl 0.9.
    if not entry(config, f"{ROLLOUT}.calculate_log_probs", route == "trainers"):
        yield Finding(
            "error",
            f"{ROLLOUT}.calculate_log_probs = False: the log-probs that tokens were sampled with are thrown away",
            f"set {ROLLOUT}.calculate_log_probs=True",
        )
    if entry(config, "algorithm.rollout_correction.bypass_mode", False):
        yield Finding(
            "error",
            "algorithm.rollout_correction.bypass_mode = True: old log-probs are copies of the sampled ones, so every "
            "ratio is 1 and every target Monte-Carlo",
            "set algorithm.rollout_correction.bypass_mode=False",
        )
    for name, whole in WHOLE_DISTRIBUTION.items():
        given = entry(config, f"{ROLLOUT}.{name}", whole[0])
        if given not in whole:
            yield Finding(
                "warning",
                f"{ROLLOUT}.{name} = {given}: tokens come from a cut-off distribution, verl's actor scores them under "
                "the whole one, so every ratio is too small",
                f"set {ROLLOUT}.{name}={whole[0]}",
            )
