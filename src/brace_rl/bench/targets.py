"""How fast the value target is, against the loop over tokens that most trainers ship."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from brace_rl.bench.timing import median_seconds, torch_threads
from brace_rl.core import brace_targets

SHAPE = (64, 16_384)
WINDOWS = (10, 100, 1000)
TOOL_SPAN = (512, 64)
"""Policy tokens before each tool output, and its length, of the rows with gaps."""


def loop_gae(*, values: Tensor, rewards: Tensor, policy_mask: Tensor, gamma: float = 1.0, lam: float = 0.95) -> Tensor:
    """GAE targets ``[B, T]`` by the usual Python loop, one iteration a token; the baseline of the comparison.

    At tokens outside ``policy_mask`` the next value and the running sum are carried past.
    """
    targets = torch.zeros_like(values)
    next_values, running = torch.zeros_like(values[:, 0]), torch.zeros_like(values[:, 0])
    for t in reversed(range(values.shape[1])):
        residual = rewards[:, t] + gamma * next_values - values[:, t]
        here = residual + gamma * lam * running
        running = torch.where(policy_mask[:, t], here, running)
        next_values = torch.where(policy_mask[:, t], values[:, t], next_values)
        targets[:, t] = torch.where(policy_mask[:, t], running + values[:, t], 0.0)
    return targets


def measure_targets(
    *, device: torch.device, shape: tuple[int, int] = SHAPE, threads: int = 1, repeats: int = 7
) -> list[dict[str, Any]]:
    """One row per estimator: name, milliseconds, and its speed as a multiple of the loop's."""
    inputs = target_inputs(shape, device)
    gaps = inputs | {"policy_mask": _with_tool_spans(inputs["policy_mask"])}
    plain = {name: inputs[name] for name in ("values", "rewards", "policy_mask")}
    cases: list[tuple[str, Callable[[], object]]] = [("GAE, Python loop", partial(loop_gae, **plain))]
    for window in WINDOWS:
        cases.append((f"BRACE, window {window}", partial(brace_targets, **inputs, window=window)))
    cases.append(("BRACE, window 100, tool spans", partial(brace_targets, **gaps, window=100)))
    cases.append(("BRACE, window 100, unchecked", partial(brace_targets, **inputs, window=100, check_inputs=False)))
    rows: list[dict[str, Any]] = []
    with torch_threads(threads):
        for name, run in cases:
            slow = not rows
            seconds = median_seconds(run, repeats=3 if slow else repeats, device=device)
            first = seconds if slow else rows[0]["milliseconds"] / 1e3
            rows.append({"target": name, "milliseconds": seconds * 1e3, "times faster than the loop": first / seconds})
    return rows


def target_inputs(shape: tuple[int, int], device: torch.device) -> dict[str, Any]:
    """Arguments of a value target: full rows, and a reward at the end of some."""
    generator = torch.Generator().manual_seed(0)
    values = torch.rand(shape, generator=generator)
    behavior_logprobs = -torch.rand(shape, generator=generator)
    target_logprobs = behavior_logprobs + 0.1 * torch.randn(shape, generator=generator)
    rewards = torch.zeros(shape)
    rewards[:, -1] = (torch.rand(shape[0], generator=generator) < 0.5).float()
    tensors = {
        "values": values,
        "rewards": rewards,
        "behavior_logprobs": behavior_logprobs,
        "target_logprobs": target_logprobs,
        "policy_mask": torch.ones(shape, dtype=torch.bool),
    }
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def _with_tool_spans(policy_mask: Tensor) -> Tensor:
    policy, tool = TOOL_SPAN
    columns = torch.arange(policy_mask.shape[1], device=policy_mask.device) % (policy + tool)
    return policy_mask & (columns < policy)
