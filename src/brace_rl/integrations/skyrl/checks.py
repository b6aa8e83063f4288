"""What in a SkyRL configuration keeps BRACE from working, without importing SkyRL.

The trainers refuse to start on an error, with the same words as ``brace doctor skyrl``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from brace_rl.errors import ConfigError
from brace_rl.integrations.checking import entry, refuse, window_findings
from brace_rl.integrations.finding import Finding
from brace_rl.integrations.skyrl.options import NODE, options_from_algorithm

ALGORITHM = "trainer.algorithm"
SAMPLING = "generator.sampling_params"
LOGPROBS_MODE = "generator.inference_engine.engine_init_kwargs.logprobs_mode"

WHOLE_DISTRIBUTION = {"top_p": (1.0,), "top_k": (-1, 0), "min_p": (0.0,), "repetition_penalty": (1.0,)}
"""Sampling setting -> values that leave the distribution as the model has it, the usual one first."""


def config_findings(config: Mapping[str, Any]) -> list[Finding]:
    """Findings about a SkyRL configuration as nested mappings; what is missing counts as SkyRL's default."""
    found = [*_critic_findings(config), *_batch_findings(config)]
    try:
        options = options_from_algorithm(entry(config, ALGORITHM, {}))
    except ConfigError as error:
        return [*found, Finding("error", str(error), "see docs/skyrl.md for the options")]
    if options.needs_ratios:
        found += [*_logprob_findings(config), *_distribution_findings(config)]
    return [
        *found,
        *_mask_findings(config),
        *window_findings(options, lam=f"{ALGORITHM}.lambd", window=f"{NODE}.window"),
    ]


def refuse_errors(config: Mapping[str, Any]) -> None:
    """Stop on a configuration that BRACE cannot work with.

    Raises:
        ConfigError: every error of :func:`config_findings`, with its mend.
    """
    refuse(config_findings(config))


def _critic_findings(config: Mapping[str, Any]) -> Iterator[Finding]:
    if not entry(config, "trainer.critic.model.path", None):
        yield Finding(
            "error",
            "trainer.critic.model.path = None: there is no critic whose target to correct",
            "set trainer.critic.model.path to the model that the critic starts from",
        )
    estimator = entry(config, f"{ALGORITHM}.advantage_estimator", "grpo")
    if estimator != "gae":
        yield Finding(
            "error",
            f"{ALGORITHM}.advantage_estimator = {estimator}: BRACE takes its place, and the others have no use for a "
            "critic",
            f"set {ALGORITHM}.advantage_estimator=gae",
        )


def _batch_findings(config: Mapping[str, Any]) -> Iterator[Finding]:
    if entry(config, "generator.step_wise_trajectories", False):
        yield Finding(
            "error",
            "generator.step_wise_trajectories = True: a trajectory is cut into rows of one turn, so no target sees the "
            "turns after its own, and SkyRL itself allows no gae there",
            "set generator.step_wise_trajectories=False",
        )
    if entry(config, "trainer.fully_async.simulate_training", False):
        yield Finding(
            "error",
            "trainer.fully_async.simulate_training = True: nothing is trained",
            "set trainer.fully_async.simulate_training=False",
        )
    if entry(config, f"{ALGORITHM}.advantage_batch_normalize", False):
        yield Finding(
            "warning",
            f"{ALGORITHM}.advantage_batch_normalize = True: advantages are whitened already, and SkyRL takes this mean "
            "over padding and tool tokens too",
            f"set {ALGORITHM}.advantage_batch_normalize=False",
        )


def _logprob_findings(config: Mapping[str, Any]) -> Iterator[Finding]:
    if entry(config, f"{SAMPLING}.logprobs", 1) is None:
        yield Finding(
            "error",
            f"{SAMPLING}.logprobs = None: the log-probs that tokens were sampled with are not asked for",
            f"set {SAMPLING}.logprobs=1",
        )
    if entry(config, "generator.chat_template.name_or_path", None) is not None:
        yield Finding(
            "error",
            "generator.chat_template.name_or_path: SkyRL renders conversations anew under a template of your own, and "
            "has no log-probs for tokens that were not sampled",
            "leave it out; the tokenizer's own template is used",
        )


def _distribution_findings(config: Mapping[str, Any]) -> Iterator[Finding]:
    sampled = entry(config, f"{SAMPLING}.temperature", 1.0)
    scored = entry(config, f"{ALGORITHM}.temperature", None)
    if scored is not None and scored != sampled:
        yield Finding(
            "warning",
            f"{ALGORITHM}.temperature = {scored}: tokens are sampled at {sampled}, so policy and engine score "
            "them under different distributions",
            f"leave {ALGORITHM}.temperature out; SkyRL takes that of {SAMPLING}",
        )
    if sampled != 1.0 and entry(config, LOGPROBS_MODE, None) != "processed_logprobs":
        yield Finding(
            "warning",
            f"{SAMPLING}.temperature = {sampled}: vLLM reports log-probs from before the temperature, SkyRL's policy "
            "those after it, so every ratio is wrong",
            f"set {SAMPLING}.temperature=1.0, or {LOGPROBS_MODE}=processed_logprobs",
        )
    for name, whole in WHOLE_DISTRIBUTION.items():
        given = entry(config, f"{SAMPLING}.{name}", whole[0])
        if given not in whole:
            yield Finding(
                "warning",
                f"{SAMPLING}.{name} = {given}: tokens come from another distribution than the one that SkyRL's policy "
                "scores them under, so ratios are off",
                f"set {SAMPLING}.{name}={whole[0]}",
            )


def _mask_findings(config: Mapping[str, Any]) -> Iterator[Finding]:
    """Masks that reject whole responses. SkyRL's off-policy correction is none of them: it acts in the policy loss."""
    if entry(config, f"{ALGORITHM}.zero_variance_filter", False):
        yield Finding(
            "warning",
            f"{ALGORITHM}.zero_variance_filter = True: made for group baselines; here it keeps groups of equal rewards "
            "from the critic too, which could learn from them",
            f"set {ALGORITHM}.zero_variance_filter=False",
        )
    if entry(config, "generator.apply_overlong_filtering", False):
        yield Finding(
            "warning",
            "generator.apply_overlong_filtering = True: truncated responses lose their mask in the generator, so the "
            "critic never learns what they earned",
            "set generator.apply_overlong_filtering=False",
        )
