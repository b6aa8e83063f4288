"""Rollouts whose every number is consistent, made from a small model; a fault is then put in by hand.

A response is a walk ``x``. Each token is one of three, and moves ``x`` by its effect less the mean effect
under mu, so ``x`` is a martingale and V before a token is exactly ``x``. The reward is ``x`` after the last token plus
noise. ``pi`` has logits ``z``; ``mu`` has ``z`` plus noise that grows with the lag. With ``gain`` the logits of pi lean
towards good effects, so pi earns more than mu and a critic of ``V^mu`` is stale.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np

Row = dict[str, Any]
TOOL_TOKENS = 3
CURRENT = 10


def clean_rows(
    *, prompts: int = 60, samples: int = 4, gain: float = 0.0, noise: float = 0.03, longest: int = 60, seed: int = 0
) -> list[Row]:
    """Rows with every column; tokens of lag 0 to 3, most responses straddle an update, and call a tool once."""
    rng = np.random.default_rng(seed)
    rows = []
    for prompt in range(prompts):
        start = float(rng.normal(0.0, 0.5))
        for _ in range(samples):
            rows.append(_response(rng, f"p{prompt}", start, int(rng.integers(12, longest)), gain, noise))
    return rows


def _response(rng: np.random.Generator, prompt: str, x: float, length: int, gain: float, noise: float) -> Row:
    first, switch = CURRENT - int(rng.integers(1, 4)), int(rng.integers(2, length - 2))
    tool_at = int(rng.integers(4, length - 4))
    version = first + (np.arange(length) >= switch)
    lag = (CURRENT - version)[:, None]
    z = rng.normal(size=(length, 3)) * rng.choice([0.5, 4.0], (length, 1))
    effect = rng.normal(0, 0.3, (length, 3))
    effect[0] = 0  # all begin with the same token, which changes nothing
    mu = log_softmax(z + (1e-3 + noise * lag) * rng.normal(size=(length, 3)))
    pi = log_softmax(z + gain * lag * effect)
    token = (rng.random((length, 1)) > np.exp(mu).cumsum(1)).sum(1).clip(max=2)
    at = np.arange(length), token
    moves = effect[at] - (np.exp(mu) * effect).sum(1)
    token_ids = np.where(np.arange(length) > 0, token + 3 * rng.integers(0, 10**6, length), 0)
    walk = x + np.concatenate(([0.0], moves.cumsum()))
    tool = [tool_at] * TOOL_TOKENS
    rewards = np.zeros(length + TOOL_TOKENS)
    rewards[-1] = walk[-1] + rng.normal(0, 0.1)
    return {
        "behavior_logprobs": np.insert(mu[at], tool, np.nan).tolist(),
        "target_logprobs": np.insert(pi[at], tool, np.nan).tolist(),
        "values": np.insert(walk[:-1], tool, np.nan).tolist(),
        "policy_mask": np.insert(np.ones(length, dtype=bool), tool, False).tolist(),
        "rewards": rewards.tolist(),
        "token_ids": np.insert(token_ids, tool, -2).tolist(),
        "versions": np.insert(version, tool, -1).tolist(),
        "current_version": CURRENT,
        "prompt_id": prompt,
        "truncated": False,
        "bootstrap": 0.0,
    }


def log_softmax(z: np.ndarray) -> np.ndarray:
    """Over the last axis."""
    shifted = z - z.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def policy_indices(row: Row) -> list[int]:
    return [i for i, is_policy in enumerate(row["policy_mask"]) if is_policy]


def write_rows(path: Path, rows: list[Row]) -> Path:
    """JSON lines (gzipped where the name says so) or parquet, by the suffix."""
    if path.suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=50)
        return path
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path
