"""The one function every adapter calls: a framework's ``[B, T]`` tensors in, value targets and advantages out.

Frameworks differ in what their masks mean, so this asks for two. The *action mask* is structural: true where the policy
wrote the token, whatever became of it later. The *loss mask* is what the framework trains on, after rejection. Targets
are computed on the first and never see the second: a reward on a rejected token still reaches the critic.

Nothing outside the action mask is read except rewards, so NaN, infinities and stale values there change nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from numbers import Real
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from brace_rl import core
from brace_rl.core.checks import check_options, check_shapes, tensors_of
from brace_rl.diagnostics.batch import ratio_statistics, target_statistics, window_weight_statistics

ValueTarget = Literal["brace", "vtrace", "capped", "gae", "monte_carlo"]
Advantage = Literal["eq27", "gae"]
AutomaticWindow = Literal["auto", "auto_path"]

WITH_RATIOS = ("brace", "vtrace", "capped")
"""Value targets that need the log-probs of both policies."""

WITH_WINDOW = ("brace", "capped")

LARGEST_WINDOW = 2**31 - 1
"""Far beyond any response, and small enough for every integer type."""


@dataclass(frozen=True)
class TokenLevelOptions:
    """What to compute. Defaults are the paper's (arXiv 2609.09783).

    Attributes:
        value_target: the critic's regression target.
        window: policy tokens corrected before the return takes over, at least 0; ``auto``: one for the batch, from its
            measured drift (Eq. 45); ``auto_path``: one per token, from the ratios ahead of it.
        auto_eps: ``auto``: weight the return keeps on average.
        auto_budget: ``auto_path``: sum of ``|log min(c_clip, w)|`` that closes a window.
        rho_clip, c_clip: caps of the residual's and of the trace's ratio.
        gamma: discount per policy token.
        lam: lambda of the target; multiplies every trace coefficient.
        advantage: ``eq27``: what the target says (Eq. 27, and target less value for ``gae`` and ``monte_carlo``);
            ``gae``: generalised advantage with a lambda of its own, whatever the critic is fitted to.
        policy_lam: lambda of ``advantage = gae``.
        whiten: advantages to mean 0 and variance 1 over the loss mask.

    Raises:
        ValueError: names the option, what it is and what it may be.
    """

    value_target: ValueTarget = "brace"
    window: int | AutomaticWindow = 100
    auto_eps: float = 0.01
    auto_budget: float = 4.0
    rho_clip: float = 1.2
    c_clip: float = 1.1
    gamma: float = 1.0
    lam: float = 1.0
    advantage: Advantage = "eq27"
    policy_lam: float = 0.95
    whiten: bool = True

    def __post_init__(self) -> None:
        for name in ("auto_eps", "auto_budget", "rho_clip", "c_clip", "gamma", "lam", "policy_lam"):
            given = getattr(self, name)
            if isinstance(given, bool) or not isinstance(given, Real):
                raise ValueError(f"{name} = {given!r}: must be a number")
        if not isinstance(self.whiten, bool):
            raise ValueError(f"whiten = {self.whiten!r}: must be true or false")
        check_options(rho_clip=self.rho_clip, c_clip=self.c_clip, gamma=self.gamma, lam=self.lam)
        for name, kind in (("value_target", ValueTarget), ("advantage", Advantage)):
            given, known = getattr(self, name), get_args(kind)
            if given not in known:
                raise ValueError(f"{name} = {given!r}: must be one of {', '.join(known)}")
        is_number = isinstance(self.window, int) and not isinstance(self.window, bool)
        in_range = isinstance(self.window, int) and 0 <= self.window <= LARGEST_WINDOW
        if not (is_number and in_range) and self.window not in get_args(AutomaticWindow):
            automatic = " or ".join(get_args(AutomaticWindow))
            raise ValueError(
                f"window = {self.window!r}: must be a whole number from 0 to {LARGEST_WINDOW}, or {automatic}"
            )
        if not 0 < self.auto_eps < 1:
            raise ValueError(f"auto_eps = {self.auto_eps}: must be between 0 and 1")
        if not self.auto_budget >= 0:
            raise ValueError(f"auto_budget = {self.auto_budget}: must be at least 0")
        if not 0 <= self.policy_lam <= 1:
            raise ValueError(f"policy_lam = {self.policy_lam}: must be between 0 and 1")

    @classmethod
    def from_mapping(cls, mapping: Any) -> TokenLevelOptions:
        """Options from a framework's configuration node.

        Raises:
            ValueError: no mapping, an option that does not exist, or a value out of range.
        """
        try:
            given = dict(mapping)
        except (TypeError, ValueError):
            raise ValueError(f"options = {mapping!r}: must be a mapping of option names to values") from None
        known = [option.name for option in fields(cls)]
        for name in given:
            if name not in known:
                raise ValueError(f"{name}: no such option; there are {', '.join(known)}")
        return cls(**given)

    @property
    def needs_ratios(self) -> bool:
        """Whether the log-probs of both policies enter the target."""
        return self.value_target in WITH_RATIOS


class TokenLevelEstimates(NamedTuple):
    """What a critic is fitted to and an actor is trained on.

    Attributes:
        targets: ``[B, T]`` regression target of V before each action token, 0 elsewhere.
        advantages: ``[B, T]``, 0 outside the action mask; when whitened, 0 outside the loss mask too.
        metrics: figures of the batch by name, scalar tensors. Besides those of :mod:`brace_rl.diagnostics.batch`:
            ``rows/without_action``: rows left out because the policy wrote nothing in them;
            ``rewards/moved``: rewards found behind an action token and given to it;
            ``ratio/all_one``: 1 when both policies' log-probs are the same numbers at every action token, so that every
            correction is Monte-Carlo: right when no token is stale, a sign of overwritten log-probs otherwise;
            ``window/mean``: the window of a token, on average (of those asked for: a response may end before).
    """

    targets: Tensor
    advantages: Tensor
    metrics: dict[str, Tensor]


@torch.no_grad()
def token_level_estimates(
    *,
    values: Tensor,
    rewards: Tensor,
    action_mask: Tensor,
    behavior_logprobs: Tensor | None = None,
    target_logprobs: Tensor | None = None,
    loss_mask: Tensor | None = None,
    bootstrap_values: Tensor | None = None,
    segment_ids: Tensor | None = None,
    options: TokenLevelOptions | None = None,
) -> TokenLevelEstimates:
    """Value targets, advantages and figures of one batch, over response tokens, time last.

    Args:
        values: ``[B, T]`` the critic *before* token ``t``, from before the update.
        rewards: ``[B, T]`` as the framework holds them. A reward on a token that the policy did not write belongs to
            the last one it did write before; what is not finite there counts as none.
        action_mask: ``[B, T]`` bool, true where the policy wrote the token: structural, before any rejection.
        behavior_logprobs: ``[B, T]`` log mu, recorded when the token was sampled; None where no ratios are needed.
        target_logprobs: ``[B, T]`` log pi of the trainer's policy before the update; None likewise.
        loss_mask: ``[B, T]`` bool, what the losses will be taken over, after rejection; None: the action mask. It
            decides over which tokens advantages are whitened, and nothing else.
        bootstrap_values: ``[B]`` value after the last token of rows that were cut off, 0 for rows that ended; None: no
            row is bootstrapped. ``[B, T]`` with ``segment_ids``, read at the last action token of each response.
        segment_ids: ``[B, T]`` integers, runs of equal ids are responses; None: one response per row.
        options: None: the paper's.

    Raises:
        ValueError: names the argument, the place and the mend.
    """
    options = TokenLevelOptions() if options is None else options
    ratios = {"behavior_logprobs": behavior_logprobs, "target_logprobs": target_logprobs}
    _check_options(options, ratios)
    _check_what_is_read_first(action_mask, loss_mask, {"values": values, "rewards": rewards})
    # A row without actions has nobody to earn its reward; what stands there must not stop the others.
    earnable = action_mask.any(1, keepdim=True) & (action_mask | rewards.isfinite())
    rewards = torch.where(earnable, rewards, 0.0)
    common: dict[str, Any] = {
        "values": values,
        "rewards": rewards,
        "policy_mask": action_mask,
        "gamma": options.gamma,
        "bootstrap_values": bootstrap_values,
        "segment_ids": segment_ids,
    }
    windows = _windows(options, ratios, action_mask, segment_ids)
    estimate = _value_targets(options, common, ratios, windows)
    advantages = estimate.advantages
    if options.advantage == "gae":
        advantages = core.gae_targets(**common, lam=options.policy_lam).advantages
    metrics = _metrics(options, common, ratios, windows, estimate.targets, advantages)
    if options.whiten:
        trained = action_mask if loss_mask is None else action_mask & loss_mask
        advantages = core.whiten(advantages, trained)
    return TokenLevelEstimates(targets=estimate.targets, advantages=advantages, metrics=metrics)


def _check_options(options: object, ratios: dict[str, Tensor | None]) -> None:
    if not isinstance(options, TokenLevelOptions):
        raise ValueError(
            f"options: got {type(options).__name__}, must be TokenLevelOptions; use TokenLevelOptions.from_mapping"
        )
    missing = next((name for name, logprobs in ratios.items() if logprobs is None), None)
    if options.needs_ratios and missing is not None:
        raise ValueError(f"{missing}: missing, and value_target = {options.value_target} needs it")


def _check_what_is_read_first(action_mask: Tensor, loss_mask: Tensor | None, floats: dict[str, Tensor]) -> None:
    """Before rewards are sorted out here; whatever else is given is checked by the core."""
    check_shapes(action_mask, tensors_of(floats), mask_name="action_mask")
    if action_mask.numel() == 0:
        raise ValueError(f"action_mask: got {list(action_mask.shape)}; a batch needs a row and a token at least")
    if loss_mask is None:
        return
    tensors_of({"loss_mask": loss_mask})
    if loss_mask.dtype != torch.bool or loss_mask.shape != action_mask.shape:
        raise ValueError(
            f"loss_mask: got {list(loss_mask.shape)} {loss_mask.dtype}, must be {list(action_mask.shape)} bool like "
            "action_mask"
        )


def _windows(
    options: TokenLevelOptions, ratios: dict[str, Any], action_mask: Tensor, segment_ids: Tensor | None
) -> int | Tensor:
    if isinstance(options.window, int) or options.value_target not in WITH_WINDOW:
        # V-trace has no window: it corrects to the end of every response.
        return options.window if isinstance(options.window, int) else action_mask.shape[1]
    common = {**ratios, "policy_mask": action_mask, "c_clip": options.c_clip}
    if options.window == "auto":
        return core.drift_window(**common, eps=options.auto_eps, gamma=options.gamma, lam=options.lam).window
    return core.path_windows(**common, budget=options.auto_budget, segment_ids=segment_ids)


def _value_targets(
    options: TokenLevelOptions, common: dict[str, Any], ratios: dict[str, Any], windows: int | Tensor
) -> core.ValueTargets:
    if options.value_target == "monte_carlo":
        return core.monte_carlo_targets(**common)
    if options.value_target == "gae":
        return core.gae_targets(**common, lam=options.lam)
    corrected = {**common, **ratios, "rho_clip": options.rho_clip, "c_clip": options.c_clip, "lam": options.lam}
    if options.value_target == "vtrace":
        return core.vtrace_targets(**corrected)
    estimator = core.brace_targets if options.value_target == "brace" else core.capped_targets
    return estimator(**corrected, window=windows)


def _metrics(
    options: TokenLevelOptions,
    common: dict[str, Any],
    ratios: dict[str, Any],
    windows: int | Tensor,
    targets: Tensor,
    advantages: Tensor,
) -> dict[str, Tensor]:
    mask, rewards = common["policy_mask"], common["rewards"]
    metrics = {
        "rows/without_action": (~mask.any(1)).sum(),
        "rewards/moved": ((rewards != 0) & ~mask).sum(),
        **target_statistics(values=common["values"], targets=targets, advantages=advantages, policy_mask=mask),
    }
    if ratios["behavior_logprobs"] is None or ratios["target_logprobs"] is None:
        return metrics
    traces: dict[str, Any] = {"c_clip": options.c_clip, "gamma": options.gamma, "lam": options.lam}
    metrics |= ratio_statistics(**ratios, policy_mask=mask, **traces)
    metrics["ratio/all_one"] = ((ratios["behavior_logprobs"] == ratios["target_logprobs"]) | ~mask).all().long()
    if options.value_target in WITH_WINDOW:
        shared = {"policy_mask": mask, "segment_ids": common["segment_ids"], "window": windows}
        weights = core.window_weights(**ratios, **shared, **traces)
        metrics |= window_weight_statistics(window_weights=weights, policy_mask=mask)
        each = torch.as_tensor(windows, device=mask.device).expand(mask.shape)
        metrics["window/mean"] = torch.where(mask, each, 0).sum() / mask.sum().clamp(min=1)
    return metrics
