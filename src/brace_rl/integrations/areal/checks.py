"""What in an AReaL configuration keeps BRACE from working, without importing AReaL.

The trainer refuses to start on an error, with the same words as ``brace doctor areal``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from brace_rl.errors import ConfigError
from brace_rl.integrations.areal.options import NODE, options_from_actor
from brace_rl.integrations.checking import entry, window_findings
from brace_rl.integrations.finding import Finding

BACKENDS = ("fsdp", "megatron", "archon")
"""AReaL's engines for training, as ``actor.backend`` begins."""

WHOLE_VOCABULARY = 10_000
"""A ``top_k`` of this size or more cuts next to nothing off; AReaL's default is a hundred million."""


def config_findings(config: Mapping[str, Any]) -> list[Finding]:
    """Findings about an AReaL configuration as nested mappings; what is missing counts as AReaL's default."""
    found = list(_critic_findings(config))
    try:
        options = options_from_actor(entry(config, "actor", {}))
    except ConfigError as error:
        return [*found, Finding("error", str(error), "see docs/areal.md for the options")]
    if options.needs_ratios:
        found += [*_logprob_findings(config), *_distribution_findings(config)]
    found += _reward_findings(config)
    return [*found, *window_findings(options, lam="actor.gae_lambda", window=f"{NODE}.window")]


def _critic_findings(config: Mapping[str, Any]) -> Iterator[Finding]:
    if entry(config, "critic", None) is None:
        yield Finding(
            "error",
            "critic: not there, so there is no critic whose target to correct",
            "add a critic section: path, backend, optimizer, is_critic=true",
        )
    backend = str(entry(config, "actor.backend", "") or "")
    if backend and not backend.startswith(BACKENDS):
        yield Finding(
            "error",
            f"actor.backend = {backend}: an engine that BRACE does not know",
            f"use one of {', '.join(BACKENDS)}",
        )


def _logprob_findings(config: Mapping[str, Any]) -> Iterator[Finding]:
    decoupled = entry(config, "actor.use_decoupled_loss", False)
    method = entry(config, "actor.prox_logp_method", "recompute")
    if not decoupled and not entry(config, "actor.recompute_logprob", False):
        yield Finding(
            "error",
            "actor.use_decoupled_loss = False and actor.recompute_logprob = False: the policy's own log-probs are "
            "never computed",
            "set actor.use_decoupled_loss=true, or actor.recompute_logprob=true",
        )
    if decoupled and method == "loglinear":
        yield Finding(
            "error",
            "actor.prox_logp_method = loglinear: the policy's forward pass is skipped, its log-probs are guessed later",
            "set actor.prox_logp_method=recompute",
        )


def _distribution_findings(config: Mapping[str, Any]) -> Iterator[Finding]:
    sampled, scored = (entry(config, f"{section}.temperature", 1.0) for section in ("gconfig", "actor"))
    if sampled != scored:
        yield Finding(
            "warning",
            f"actor.temperature = {scored}, gconfig.temperature = {sampled}: policy and engine score tokens under "
            "different distributions",
            "set actor.temperature: ${gconfig.temperature}",
        )
    if sampled != 1.0 and str(entry(config, "rollout.backend", "") or "").startswith("vllm"):
        yield Finding(
            "warning",
            f"gconfig.temperature = {sampled} with vLLM: it reports log-probs from before the temperature, the policy "
            "those after it, so every ratio is wrong",
            "set gconfig.temperature=1.0, or sample with SGLang",
        )
    top_p, top_k = entry(config, "gconfig.top_p", 1.0), entry(config, "gconfig.top_k", WHOLE_VOCABULARY)
    frequency = entry(config, "gconfig.frequency_penalty", 0.0)
    cut = {"top_p": (top_p, 1.0, top_p != 1.0), "top_k": (top_k, -1, 0 < top_k < WHOLE_VOCABULARY)}
    cut["frequency_penalty"] = (frequency, 0.0, frequency != 0.0)
    for name, (given, whole, is_cut) in cut.items():
        if is_cut:
            yield Finding(
                "warning",
                f"gconfig.{name} = {given}: tokens come from another distribution than the one the policy scores them "
                "under, so ratios are off",
                f"set gconfig.{name}={whole}",
            )


def _reward_findings(config: Mapping[str, Any]) -> Iterator[Finding]:
    # AReaL's default of 0.1 is met by most configurations with a reference, and by every one without.
    penalty = entry(config, "actor.kl_ctl", 0.1)
    if penalty and entry(config, "ref", None) is None:
        yield Finding(
            "warning",
            f"actor.kl_ctl = {penalty} without ref: AReaL takes the reference's log-probs for 0, so every token is "
            "rewarded for being improbable",
            "set actor.kl_ctl=0.0, or add a ref section",
        )
    if entry(config, "actor.mask_no_eos_with_zero", False):
        yield Finding(
            "warning",
            "actor.mask_no_eos_with_zero = True: AReaL takes the longest response of every batch for cut off, and its "
            "reward from it",
            "set actor.mask_no_eos_with_zero=false",
        )
