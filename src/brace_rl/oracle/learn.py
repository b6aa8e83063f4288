"""Real PPO from real samples at an exact lag, all seeds in one batch of tensors; only its evaluation is exact.

The actor is a softmax table over the MDP's observations, the critic a table over (stretch of positions, state), or over
stretches alone. Batch ``n`` is drawn from the weights after step ``n - S`` (the first ones from the start). One update
per batch, losses and targets from :mod:`brace_rl.core`, Adam on both tables. Seeds are independent: whitening, batch
windows and losses are per seed. Two methods with the same seed see the same random numbers, so their difference can be
taken seed by seed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from brace_rl import core
from brace_rl.oracle.actor_side import ActorSide
from brace_rl.oracle.mdp import Policies, TokenMDP, policy_values
from brace_rl.oracle.methods import AUTOMATIC, Method
from brace_rl.oracle.presets import Preset
from brace_rl.oracle.sampling import Paths, Steps, draw_paths, path_rewards, read_tokens
from brace_rl.oracle.settings import LearnConfig
from brace_rl.oracle.targets import Responses, sampled_targets, sampled_windows

ADAM_BETAS = (0.9, 0.95)
"""As in the trainer's configuration."""


@dataclass(frozen=True, eq=False)
class Curve:
    """What one method did on one task; ``P`` points, ``N`` seeds.

    Attributes:
        steps: ``[P]`` trainer steps done at each point, from 0.
        success: ``[P, N]`` exact value of the current policy at the start.
        critic_bias: ``[P - 1, N]`` mean of ``V - V^pi`` over the tokens of the batch of each point but the first.
        critic_error: ``[P - 1, N]`` root mean square of the same.
        target_bias, target_error: ``[P - 1, N]`` the same of the targets those tokens were given.
        mean_window: mean of the windows chosen, over all tokens and steps; None for methods without a choice.
        ratio_spread: standard deviation of ``log w`` over all tokens and steps.
        mean_ratio: mean of ``w`` over the same; 1 in expectation where what is recorded is what was sampled from.
        seconds: wall time.
    """

    method: str
    lag: int
    steps: list[int]
    success: Tensor
    critic_bias: Tensor
    critic_error: Tensor
    target_bias: Tensor
    target_error: Tensor
    mean_window: float | None
    ratio_spread: float
    mean_ratio: float
    seconds: float

    @property
    def area(self) -> Tensor:
        """``[N]`` mean success over the curve (trapezium rule): how soon and how far."""
        width = torch.tensor(self.steps, dtype=torch.float64).diff()[:, None]
        return ((self.success[1:] + self.success[:-1]) / 2 * width).sum(0) / width.sum()

    @property
    def final(self) -> Tensor:
        """``[N]`` success at the end."""
        return self.success[-1]


def learn(
    preset: Preset, method: Method, config: LearnConfig, *, on_step: Callable[[int], None] | None = None
) -> Curve:
    """Train all seeds and evaluate them exactly every ``eval_every`` steps and at the end."""
    began = perf_counter()
    learner = Learner(preset, method, config)
    points, success = [0], [learner.success()]
    gaps = []
    for step in range(1, config.steps + 1):
        learner.step(train_actor=step > config.critic_warmup)
        if step % config.eval_every == 0 or step == config.steps:
            points.append(step)
            values = learner.policy_values()
            success.append(values[:, 0, preset.mdp.start])
            gaps.append(torch.stack([learner.critic_gaps(values), learner.target_gaps(values)]))
        if on_step is not None:
            on_step(step)
    bias, error = torch.stack(gaps).mean(-1), torch.stack(gaps).square().mean(-1).sqrt()
    return Curve(
        method=method.name,
        lag=config.lag,
        steps=points,
        success=torch.stack(success),
        critic_bias=bias[:, 0],
        critic_error=error[:, 0],
        target_bias=bias[:, 1],
        target_error=error[:, 1],
        mean_window=learner.mean_window / config.steps if method.kind in AUTOMATIC else None,
        ratio_spread=(learner.squared_log_ratio / config.steps) ** 0.5,
        mean_ratio=learner.mean_ratio / config.steps,
        seconds=perf_counter() - began,
    )


class Learner:
    """Tables, snapshots (the oldest, ``snapshots[0]``, samples the next batch) and one update."""

    def __init__(self, preset: Preset, method: Method, config: LearnConfig) -> None:
        self.mdp, self.method, self.config, self.engine = preset.mdp, method, config, preset.engine
        self._steps = Steps.of(preset.mdp)
        self._cells = critic_cells(preset.mdp, config.critic_bins, sees_state=config.critic_sees == "state")
        cells = int(self._cells.max()) + 1
        start = preset.logits.float().expand(config.seeds, -1, -1)
        self.actor = start.clone().requires_grad_()
        self.critic = torch.zeros(config.seeds, cells, requires_grad=True)
        self._actor_optimizer = torch.optim.Adam([self.actor], lr=config.actor_lr, betas=ADAM_BETAS)
        self._critic_optimizer = torch.optim.Adam([self.critic], lr=config.critic_lr, betas=ADAM_BETAS)
        self._actor_side = ActorSide(method, config, start)
        self.snapshots: deque[Tensor] = deque([start.clone()], maxlen=config.lag + 1)
        self._generator = torch.Generator().manual_seed(config.seed)
        self._seed_cells = torch.arange(config.seeds)[:, None, None] * cells
        self._paths: Paths | None = None
        self._targets: Tensor | None = None
        self.mean_window = self.squared_log_ratio = self.mean_ratio = 0.0

    def step(self, *, train_actor: bool) -> None:
        """One batch from the oldest snapshot, targets once, one update of each table."""
        config, seeds = self.config, self.config.seeds
        with torch.no_grad():
            sampled, recorded = self.engine.logits(self.snapshots[0], self._generator)
            paths = draw_paths(self._steps, sampled, batch=config.batch, generator=self._generator)
            behavior = read_tokens(recorded.log_softmax(-1), paths)
        logprobs = read_tokens(self.actor.log_softmax(-1), paths)
        where = self._where(paths)
        values = self.critic.flatten().index_select(0, where.flatten()).view_as(where)
        responses = Responses(
            values=values.detach(),
            rewards=path_rewards(self.mdp, paths, values.dtype),
            behavior_logprobs=behavior,
            target_logprobs=logprobs.detach(),
        )
        windows = sampled_windows(self.method, responses, groups=seeds)
        targets, advantages = sampled_targets(self.method, responses, windows=windows, groups=seeds)
        mask = torch.ones_like(values, dtype=torch.bool)
        per_seed = values.numel() // seeds  # losses are means over a seed's tokens, summed over seeds
        value_loss = core.value_loss(
            values=values,
            old_values=responses.values,
            targets=targets,
            policy_mask=mask,
            value_clip=config.value_clip,
            denominator=per_seed,
        ).loss
        _update(self._critic_optimizer, value_loss)
        if train_actor:
            advantages = whiten_each(advantages, seeds)
            actor_loss = self._actor_side.loss(
                paths=paths,
                logprobs=logprobs,
                behavior_logprobs=behavior,
                recorded=recorded,
                advantages=advantages,
                denominator=per_seed,
            )
            _update(self._actor_optimizer, actor_loss)
            self._actor_side.stepped(self.actor)
        self.snapshots.append(self.actor.detach().clone())
        self._paths, self._targets = paths, targets
        log_ratios = responses.target_logprobs - behavior
        self.squared_log_ratio += float(log_ratios.var())
        self.mean_ratio += float(log_ratios.exp().mean())
        if windows is not None:
            self.mean_window += float(windows.double().mean())

    def policy_values(self) -> Tensor:
        """``[N, H, X]`` exact values of the current policies."""
        return policy_values(self.mdp, self.mdp.policy(self.actor))

    def success(self) -> Tensor:
        """``[N]`` their values at the start."""
        return self.policy_values()[:, 0, self.mdp.start]

    def pairs(self) -> list[tuple[Policies, Tensor]]:
        """For every seed: the current policy with those that sample and record its next batch, and ``[H, X]`` V."""
        sampled, recorded = self.engine.logits(self.snapshots[0], self._generator)
        tables = (self.mdp.policy(logits) for logits in (self.actor, sampled, recorded))
        critics = self.critic.detach().double()[:, self._cells].view(-1, self.mdp.horizon, self.mdp.states)
        return [(Policies(*policies), values) for *policies, values in zip(*tables, critics, strict=True)]

    def critic_gaps(self, values: Tensor) -> Tensor:
        """``[N, tokens]`` V - V^pi at the tokens of the latest batch, for exact values ``[N, H, X]``."""
        paths = self._latest()[0]
        return self._gaps(self.critic.detach().flatten()[self._where(paths)], values)

    def target_gaps(self, values: Tensor) -> Tensor:
        """``[N, tokens]`` target - V^pi of the same tokens."""
        return self._gaps(self._latest()[1], values)

    def _latest(self) -> tuple[Paths, Tensor]:
        if self._paths is None or self._targets is None:
            raise ValueError("no batch has been drawn yet; call step first")
        return self._paths, self._targets

    def _gaps(self, x: Tensor, values: Tensor) -> Tensor:
        states = self._latest()[0].states.view(self.config.seeds, -1)
        return x.view(self.config.seeds, -1).double() - values.flatten(1).gather(1, states)

    def _where(self, paths: Paths) -> Tensor:
        """``[N * batch, H]`` index into the flat critic."""
        cells = self._cells[paths.states].view(self.config.seeds, self.config.batch, -1)
        return (cells + self._seed_cells).flatten(0, 1)


def critic_cells(mdp: TokenMDP, bins: int, *, sees_state: bool = True) -> Tensor:
    """``[H * X]`` int64 cell of each (position, state): equal stretches of positions, by state or for all together."""
    bins = min(bins, mdp.horizon)
    stretch = torch.arange(mdp.horizon)[:, None] * bins // mdp.horizon
    if not sees_state:
        return stretch.expand(-1, mdp.states).flatten()
    return (stretch * mdp.states + torch.arange(mdp.states)).flatten()


def whiten_each(advantages: Tensor, groups: int) -> Tensor:
    """Whiten each of several equal groups of rows by itself."""
    split = advantages.view(groups, -1, advantages.shape[1])
    whitened: Tensor = torch.vmap(core.whiten)(split, torch.ones_like(split, dtype=torch.bool))
    return whitened.view_as(advantages)


def _update(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
