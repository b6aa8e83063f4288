"""The options of every actor rule, and what each rule needs, without torch.

A model's fields are the keyword arguments of the rule of that name, with the same defaults, except those named in
``trainer_settings``, which the trainer reads. What was never published has no default. The needs are properties of an
instance, because they depend on the edge a rule is put on::

    options = RULE_OPTIONS["icepop"](edge="E", high=3.0)
    options.needs_proximal                                  # False
    RULES["icepop"](batch, **options.rule_arguments())

Sources of the defaults are in the docstrings of the rules.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from brace_rl.errors import ConfigError
from brace_rl.section import Section, did_you_mean


def _name(rule: str) -> Any:
    return Field(rule, description="actor rule; docs/actor_rules.md")


class RuleOptions(Section):
    """Base of all options.

    Attributes:
        rule: name of the rule these are the options of.
        trainer_settings: fields, besides ``rule``, that are no argument of the rule.
        needs_entropy: the rule reads ``behavior_entropy``.
        needs_version_lag: it reads ``version_lag``.
        needs_weight_average: its proximal log-probs are those of an average of weights.
        whole_minibatch: it decides on a token by looking at the whole minibatch, through a selector.
    """

    rule: str

    trainer_settings: ClassVar[frozenset[str]] = frozenset()
    needs_entropy: ClassVar[bool] = False
    needs_version_lag: ClassVar[bool] = False
    needs_weight_average: ClassVar[bool] = False
    whole_minibatch: ClassVar[bool] = False

    @property
    def needs_behavior(self) -> bool:
        """Whether the rule reads ``behavior_logprobs``."""
        return True

    @property
    def needs_proximal(self) -> bool:
        """Whether the rule reads ``proximal_logprobs``."""
        return False

    @property
    def fresh_only(self) -> bool:
        """Whether the rule looks past staleness altogether, so that a trainer must refuse it for stale batches."""
        return not self.needs_behavior

    def rule_arguments(self) -> dict[str, Any]:
        """Keyword arguments for the rule and its selector."""
        ours = self.trainer_settings | {"rule"}
        return {name: getattr(self, name) for name in type(self).model_fields if name not in ours}


class _Clip(RuleOptions):
    clip_low: float = Field(0.20, gt=0, le=1, description="PPO clip of the ratio below 1")
    clip_high: float = Field(0.28, gt=0, description="PPO clip of the ratio above 1")


class _RatioEdge(RuleOptions):
    edge: Literal["E", "U"] = Field("E", description="E: ratio target/behavior; U: target/proximal (fresh data only)")

    @property
    def needs_behavior(self) -> bool:
        return self.edge == "E"

    @property
    def needs_proximal(self) -> bool:
        return self.edge == "U"


class _MaskEdge(RuleOptions):
    edge: Literal["B", "E"] = Field(
        "B", description="where the mask looks: B proximal/behavior (clip on U), E target/behavior (clip on E)"
    )

    @property
    def needs_proximal(self) -> bool:
        return self.edge == "B"


class _Band(RuleOptions):
    low: float
    high: float

    @model_validator(mode="after")
    def _ordered(self) -> _Band:
        if self.low > self.high:
            raise ValueError(f"low: {self.low:g} is above high = {self.high:g}; nothing would be kept")
        return self


class PPOOptions(_Clip, _RatioEdge):
    """Clipped ratio (arXiv 1707.06347)."""

    rule: Literal["ppo"] = _name("ppo")
    dual_clip: float | None = Field(None, gt=1, description="largest ratio counted where A < 0; none: no bound")


class _WeightCap(_Clip):
    weight_cap: float = Field(5.0, gt=0, description="largest behaviour weight, proximal/behavior")
    over_cap: Literal["mask", "clamp"] = Field("mask", description="beyond the cap: drop the token, or hold the weight")


class DecoupledOptions(_WeightCap):
    """AReaL's decoupled PPO (arXiv 2505.24298)."""

    rule: Literal["decoupled"] = _name("decoupled")

    @property
    def needs_proximal(self) -> bool:
        return True


class A3POOptions(_WeightCap):
    """Decoupled PPO with an interpolated proximal policy (arXiv 2512.06547)."""

    needs_version_lag: ClassVar[bool] = True

    rule: Literal["a3po"] = _name("a3po")


class PPOEWMAOptions(_Clip):
    """Decoupled PPO around an average of weights (arXiv 2110.00641)."""

    trainer_settings: ClassVar[frozenset[str]] = frozenset({"beta"})
    needs_weight_average: ClassVar[bool] = True

    rule: Literal["ppo_ewma"] = _name("ppo_ewma")
    beta: float = Field(ge=0, lt=1, description="decay of the weight average per optimiser step; no published default")
    ratio_cap: float = Field(100.0, ge=1, description="largest total ratio target/behavior")

    @property
    def needs_proximal(self) -> bool:
        return True


class PPOEWMARevisedOptions(_Clip, _Band):
    """The same with a mask in place of the weight, and resets (arXiv 2605.12070)."""

    trainer_settings: ClassVar[frozenset[str]] = frozenset({"beta", "reset_below"})
    needs_weight_average: ClassVar[bool] = True

    rule: Literal["ppo_ewma_revised"] = _name("ppo_ewma_revised")
    low: float = Field(ge=0, description="smallest proximal/behavior kept; not published")
    high: float = Field(gt=0, description="largest proximal/behavior kept; not published")
    beta: float | None = Field(None, ge=0, lt=1, description="decay of the average; none: W/(W+2), W = max_staleness")
    reset_below: float = Field(0.9, ge=0, le=1, description="active-token fraction below which the average restarts")

    @property
    def needs_proximal(self) -> bool:
        return True


class IcePopOptions(_Clip, _Band, _MaskEdge):
    """Weight inside a band, nothing outside it (arXiv 2510.18855)."""

    rule: Literal["icepop"] = _name("icepop")
    low: float = Field(0.5, ge=0, description="smallest ratio kept")
    high: float = Field(5.0, gt=0, description="largest ratio kept")


class KPopOptions(_Clip, _MaskEdge):
    """Mask by the KL divergence of the sampled token's probability (Ring-2.6 report)."""

    rule: Literal["kpop"] = _name("kpop")
    phi: float = Field(2.0, gt=0, description="largest divergence kept, nats; published tries 0.1 to 2.0")


class ESTROptions(_Clip, _MaskEdge):
    """Trust region scaled by the behaviour entropy (arXiv 2607.22186)."""

    needs_entropy: ClassVar[bool] = True

    rule: Literal["estr"] = _name("estr")
    tau: float = Field(gt=0, description="largest squared log-ratio per nat of entropy; not published")
    eps: float = Field(0.01, ge=0, description="added to the entropy")
    edge: Literal["B", "E"] = Field(
        "E", description="where the mask looks: E target/behavior (clip on E), B proximal/behavior (clip on U)"
    )


class DISOptions(_RatioEdge):
    """Double-sided importance sampling (arXiv 2602.15763, 2607.07508)."""

    rule: Literal["dis"] = _name("dis")
    eps_low: float = Field(0.3, gt=0, le=1, description="ratios from 1 - eps_low down are dropped; code: 0.8")
    eps_high: float = Field(5.0, gt=0, description="ratios from 1 + eps_high up are dropped; code: 3.0")


class TISOptions(_Clip, _Band):
    """Truncated importance sampling between engine and trainer."""

    rule: Literal["tis"] = _name("tis")
    level: Literal["token", "sequence", "geometric"] = Field("token", description="what is weighted, or filtered")
    cap: float = Field(2.0, gt=0, description="token, sequence: largest weight")
    low: float = Field(0.999, ge=0, description="geometric: smallest mean ratio kept")
    high: float = Field(1.001, gt=0, description="geometric: largest mean ratio kept")

    @property
    def needs_proximal(self) -> bool:
        return True


class GSPOOptions(_RatioEdge):
    """One ratio per response (arXiv 2507.18071)."""

    rule: Literal["gspo"] = _name("gspo")
    clip_low: float = Field(3e-4, gt=0, le=1, description="clip of the response's ratio below 1")
    clip_high: float = Field(4e-4, gt=0, description="clip of the response's ratio above 1")


class CISPOOptions(_RatioEdge):
    """Capped weight, no clip (arXiv 2506.13585)."""

    rule: Literal["cispo"] = _name("cispo")
    cap: float = Field(5.0, gt=0, description="largest weight")


class M2POOptions(_MaskEdge):
    """Mask by the second moment of the log-ratio (arXiv 2510.01161)."""

    whole_minibatch: ClassVar[bool] = True

    rule: Literal["m2po"] = _name("m2po")
    edge: Literal["B", "E"] = Field(
        "E", description="where the mask looks: E target/behavior, B proximal/behavior (ratio on U)"
    )
    tau: float = Field(0.04, gt=0, description="kept tokens' mean squared log-ratio stays below this")


RULE_OPTIONS: dict[str, type[RuleOptions]] = {
    "ppo": PPOOptions,
    "decoupled": DecoupledOptions,
    "a3po": A3POOptions,
    "ppo_ewma": PPOEWMAOptions,
    "ppo_ewma_revised": PPOEWMARevisedOptions,
    "icepop": IcePopOptions,
    "kpop": KPopOptions,
    "estr": ESTROptions,
    "dis": DISOptions,
    "tis": TISOptions,
    "gspo": GSPOOptions,
    "cispo": CISPOOptions,
    "m2po": M2POOptions,
}
"""Name of the rule -> its options."""


def rule_options(name: str) -> type[RuleOptions]:
    """The options class of a rule.

    Raises:
        ConfigError: there is no such rule.
    """
    if name not in RULE_OPTIONS:
        raise ConfigError(f"actor.rule: no rule {name!r}{did_you_mean(name, list(RULE_OPTIONS))}")
    return RULE_OPTIONS[name]
