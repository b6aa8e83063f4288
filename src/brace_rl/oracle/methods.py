"""The value targets under comparison, by name, and what `brace_rl.core` makes of sampled responses under each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from brace_rl import core
from brace_rl.errors import BraceError

PARAMETERS = {
    "mc": None,
    "gae": ("lambda", 0.95),
    "vtrace": None,
    "uncapped": None,
    "capped": ("window", 100.0),
    "brace": ("window", 100.0),
    "drift": ("eps", 0.1),
    "path": ("budget", 1.0),
}
"""Name to its parameter and that parameter's default. The paper gives 100; the others are this project's choice."""

MEANINGS = {
    "mc": "the realised return (PPO)",
    "gae": "generalised advantage estimation, gae:LAMBDA",
    "vtrace": "V-trace over the whole response, both clips 1",
    "uncapped": "V-trace over the whole response, with BRACE's clips",
    "capped": "V-trace whose product stops after WINDOW tokens, capped:WINDOW",
    "brace": "BRACE, brace:WINDOW",
    "drift": "BRACE, one window per batch from the measured drift, drift:EPS",
    "path": "BRACE, one window per position from the ratios ahead, path:BUDGET",
}


@dataclass(frozen=True)
class Method:
    """A value target with its options.

    Attributes:
        kind: a key of ``PARAMETERS``.
        parameter: of that kind; 0 where it has none.
        rho_clip, c_clip: caps of the residual's and the trace's ratio (``vtrace`` has 1 and 1).
    """

    kind: str
    parameter: float = 0.0
    rho_clip: float = 1.2
    c_clip: float = 1.1

    @property
    def name(self) -> str:
        """As :func:`parse_method` reads it."""
        return self.kind if PARAMETERS[self.kind] is None else f"{self.kind}:{self.parameter:g}"

    @property
    def window(self) -> int:
        """Policy tokens, for the kinds whose parameter is one."""
        return int(self.parameter)


class Responses(NamedTuple):
    """Sampled tokens with everything a target reads; all ``[N, H]`` but for the flag-free scalars.

    Attributes:
        values: the critic before each token.
        rewards: received on emitting it.
        behavior_logprobs: as the engine recorded them.
        target_logprobs: of pi, before the update.
    """

    values: Tensor
    rewards: Tensor
    behavior_logprobs: Tensor
    target_logprobs: Tensor


def parse_method(text: str, *, rho_clip: float = 1.2, c_clip: float = 1.1) -> Method:
    """``NAME`` or ``NAME:NUMBER`` to a :class:`Method`.

    Raises:
        BraceError: an unknown name, or a number that is missing its range.
    """
    kind, colon, number = text.strip().partition(":")
    if kind not in PARAMETERS:
        raise BraceError(f"method {text!r}: unknown; choose from {', '.join(PARAMETERS)}")
    parameter = PARAMETERS[kind]
    if kind == "vtrace":
        rho_clip = c_clip = 1.0
    if parameter is None:
        if colon:
            raise BraceError(f"method {text!r}: {kind} takes no number")
        return Method(kind, rho_clip=rho_clip, c_clip=c_clip)
    meaning, value = parameter
    if colon:
        try:
            value = float(number)
        except ValueError:
            raise BraceError(f"method {text!r}: {number!r} is not a number ({kind}:{meaning.upper()})") from None
    _check_parameter(text, kind, value)
    return Method(kind, value, rho_clip=rho_clip, c_clip=c_clip)


def _check_parameter(text: str, kind: str, value: float) -> None:
    fits = {
        "gae": (0 <= value <= 1, "lambda must be between 0 and 1"),
        "capped": (value >= 0 and value % 1 == 0, "the window must be a whole number of tokens, 0 or more"),
        "brace": (value >= 0 and value % 1 == 0, "the window must be a whole number of tokens, 0 or more"),
        "drift": (0 < value < 1, "eps must be between 0 and 1"),
        "path": (value >= 0, "the budget must be at least 0"),
    }
    fit, rule = fits[kind]
    if not fit:
        raise BraceError(f"method {text!r}: {rule}")


def sampled_windows(method: Method, responses: Responses, groups: int) -> Tensor | None:
    """``[N, H]`` int64 windows of the kinds that choose them, or None.

    Args:
        groups: the batch holds this many independent batches of equal size; a batch window is chosen for each.
    """
    if method.kind not in ("drift", "path"):
        return None
    behavior, target = responses.behavior_logprobs, responses.target_logprobs
    mask = torch.ones_like(behavior, dtype=torch.bool)
    if method.kind == "path":
        return core.path_windows(
            behavior_logprobs=behavior,
            target_logprobs=target,
            policy_mask=mask,
            budget=method.parameter,
            c_clip=method.c_clip,
            check_inputs=False,
        )
    chosen = [
        core.drift_window(
            behavior_logprobs=b,
            target_logprobs=t,
            policy_mask=m,
            eps=method.parameter,
            c_clip=method.c_clip,
            check_inputs=False,
        ).window
        for b, t, m in zip(behavior.chunk(groups), target.chunk(groups), mask.chunk(groups), strict=True)
    ]
    return torch.stack(chosen).repeat_interleave(len(behavior) // groups)[:, None].expand_as(behavior).contiguous()


def sampled_targets(
    method: Method, responses: Responses, *, windows: Tensor | None = None, gamma: float = 1.0
) -> core.ValueTargets:
    """Targets and advantages of every token, from the library under test.

    Args:
        windows: from :func:`sampled_windows`, for the kinds that choose them.
    """
    values, rewards, behavior, target = responses
    mask = torch.ones_like(values, dtype=torch.bool)
    plain = {"values": values, "rewards": rewards, "policy_mask": mask}
    if method.kind == "mc":
        return core.monte_carlo_targets(**plain, gamma=gamma, check_inputs=False)
    if method.kind == "gae":
        return core.gae_targets(**plain, gamma=gamma, lam=method.parameter, check_inputs=False)
    ratios = plain | {"behavior_logprobs": behavior, "target_logprobs": target}
    clips = {"rho_clip": method.rho_clip, "c_clip": method.c_clip, "gamma": gamma}
    if method.kind in ("vtrace", "uncapped"):
        return core.vtrace_targets(**ratios, **clips, check_inputs=False)
    estimator = core.capped_targets if method.kind == "capped" else core.brace_targets
    window = method.window if windows is None else windows
    return estimator(**ratios, **clips, window=window, check_inputs=False)
