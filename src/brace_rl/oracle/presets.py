"""Tasks whose values are known: what `brace oracle` can be asked to look at.

All end with a reward of 0 or 1 on the last token, and all start from a policy that succeeds rarely, at a rate that does
not depend on the horizon: the shared probability of a right token is solved for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from brace_rl.errors import BraceError
from brace_rl.oracle.engine import Engine
from brace_rl.oracle.mdp import Policies, TokenMDP, policy_values

LONGEST_HORIZON = 2048
"""Tokens; the longest response that presets are tried at."""

LARGEST_LOGIT = 30.0
"""Of a right token of the start: beyond it, nothing is left to chance."""

SECTIONS, SECTION_ROUNDS = 17, 12
"""The start's logit is searched by cutting an interval into 17 parts, 12 times: to the precision of a float64."""


@dataclass(frozen=True, eq=False)
class Preset:
    """A task, the policy it starts from and the engine that samples it.

    Attributes:
        mdp: the task.
        logits: ``[C, A]`` float64 start.
        right: ``[C]`` int64 the token that helps, for each class.
        engine: how samplers and records differ from the weights.
        progress: what one trainer step adds to a right token's logit in the stale pair of :func:`stale_policies`.
    """

    name: str
    mdp: TokenMDP
    logits: Tensor
    right: Tensor
    engine: Engine
    progress: float = 0.03


def stale_policies(preset: Preset, lag: int, *, seed: int = 0) -> Policies:
    """A pair ``lag`` steps apart, for the exact figures: the start wrote the tokens, a better policy is judged.

    The target's right tokens have gained ``lag * progress`` of logit on average, unevenly over classes, and all logits
    have wandered with the square root of the lag, which is how weights drift.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = preset.logits.shape
    gain = torch.rand(shape[0], 1, generator=generator, dtype=torch.float64) * 2 * preset.progress * lag
    wander = torch.randn(shape, generator=generator, dtype=torch.float64) * preset.progress * math.sqrt(lag)
    target = preset.logits + wander + gain * torch.nn.functional.one_hot(preset.right, shape[1])
    sampled, recorded = preset.engine.logits(preset.logits[None], generator)
    policy = preset.mdp.policy
    return Policies(target=policy(target), sampler=policy(sampled[0]), recorded=policy(recorded[0]))


def chain(
    *,
    horizon: int = 256,
    errors: int = 1,
    actions: int = 2,
    classes: int = 16,
    success: float = 0.03,
    engine: Engine | None = None,
    name: str = "chain",
) -> Preset:
    """Rare reward: 1 if at most ``errors`` of ``horizon`` tokens are wrong. The state is the number of errors so far.

    The right token depends on the position's class, ``t mod classes``; classes are learnt apart.
    """
    position = torch.arange(horizon) % classes
    right = torch.arange(classes) % actions
    wrong = torch.arange(actions) != right[position][:, None]
    count = torch.arange(errors + 2)
    next_state = (count[:, None] + wrong[:, None, :].long()).clamp(max=errors + 1)
    rewards = torch.zeros(horizon, errors + 2, actions, dtype=torch.float64)
    rewards[-1] = (next_state[-1] <= errors).double()
    mdp = TokenMDP(next_state, rewards, position[:, None].expand(horizon, errors + 2).contiguous())
    logits = _start(mdp, right, torch.ones(classes, dtype=torch.bool), success)
    return Preset(name, mdp, logits, right, engine or Engine())


def branch(*, horizon: int = 256, actions: int = 4, spare: int = 3, classes: int = 8, success: float = 0.03) -> Preset:
    """An early decision decides most: token 0 picks one of ``actions`` branches.

    Only on branch 0 may ``spare`` later tokens be wrong; on every other branch one wrong token is too many. The policy
    sees its branch and the class of the position; the state is the branch and the number of errors so far. The start
    picks all branches equally often.
    """
    width = spare + 2
    states = 1 + actions * width
    position = torch.arange(horizon)[:, None, None]
    state = torch.arange(states)[:, None]
    token = torch.arange(actions)
    kind = (position - 1).clamp(min=0) % classes
    errors = ((state - 1) % width + (token != kind % actions)).clamp(max=width - 1)
    own = (state - 1).clamp(min=0) // width
    next_state = torch.where((state == 0) | (position == 0), 1 + token * width, 1 + own * width + errors)
    rewards = torch.zeros(horizon, states, actions, dtype=torch.float64)
    rewards[-1] = ((next_state[-1] - 1) % width <= torch.where(own == 0, spare, 0)).double()
    observations = torch.where((state == 0) | (position == 0), 0, 1 + own * classes + kind)[..., 0]
    right = torch.cat([torch.zeros(1, dtype=torch.int64), torch.arange(classes).repeat(actions) % actions])
    mdp = TokenMDP(next_state, rewards, observations.contiguous())
    solved = torch.ones(len(right), dtype=torch.bool)
    solved[0] = False
    return Preset("branch", mdp, _start(mdp, right, solved, success), right, Engine())


def two_drifts(**options: float) -> Preset:
    """The chain under two sources of drift: stale weights and a sampling temperature of 1.1, recorded as sampled.

    ``E_mu[w] = 1`` at every state all the same.
    """
    return chain(engine=Engine(temperature=1.1), name="drift", **options)  # type: ignore[arg-type]


def mismatch(**options: float) -> Preset:
    """The chain under an engine that records other log-probs than it sampled from, so that ``E_mu[w] > 1``.

    What it records is flatter (temperature 1.1) and noisy; ``1 / recorded`` is convex, so both raise the mean ratio.
    """
    engine = Engine(recorded_temperature=1.1, recorded_noise=0.1)
    return chain(engine=engine, name="mismatch", **options)  # type: ignore[arg-type]


PRESETS: dict[str, Callable[..., Preset]] = {
    "chain": chain,
    "branch": branch,
    "drift": two_drifts,
    "mismatch": mismatch,
}


def make_preset(name: str, **options: float) -> Preset:
    """A preset by name, with its options.

    Raises:
        BraceError: an unknown name, or an option it cannot be built with.
    """
    if name not in PRESETS:
        raise BraceError(f"preset {name!r}: unknown; choose from {', '.join(PRESETS)}")
    horizon = options.get("horizon", 2)
    if not 2 <= horizon <= LONGEST_HORIZON:
        raise BraceError(f"horizon = {horizon:g}: must be between 2 and {LONGEST_HORIZON} tokens")
    success = options.get("success", 0.5)
    if not 0 < success < 1:
        raise BraceError(f"success = {success:g}: must be between 0 and 1")
    for option, least in (("classes", 1), ("actions", 2)):
        if options.get(option, least) < least:
            raise BraceError(f"{option} = {options[option]:g}: must be at least {least}")
    return PRESETS[name](**options)


def _start(mdp: TokenMDP, right: Tensor, solved: Tensor, success: float) -> Tensor:
    """``[C, A]`` logits, the same for the right token of every class in ``solved``, that succeed at the given rate.

    Raises:
        BraceError: no logits do, which happens where the response is too short to go wrong.
    """
    direction = torch.nn.functional.one_hot(right, mdp.actions).double() * solved[:, None]
    low, high = -LARGEST_LOGIT, LARGEST_LOGIT
    for _ in range(SECTION_ROUNDS):
        tries = torch.linspace(low, high, SECTIONS + 1, dtype=torch.float64)
        reached = policy_values(mdp, mdp.policy(direction * tries[1:-1, None, None]))[:, 0, mdp.start]
        below = int((reached < success).sum())
        low, high = float(tries[below]), float(tries[below + 1])
    if max(abs(low), abs(high)) == LARGEST_LOGIT:
        raise BraceError(
            f"success = {success:g}: cannot be had from a response of {mdp.horizon} tokens; make it longer, or change "
            "the success to start from"
        )
    return direction * (low + high) / 2
