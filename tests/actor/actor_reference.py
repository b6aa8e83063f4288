"""The actor rules written down token by token in Python floats, batches to try them on, and the table of rules to try.

A token's loss is a function of ``x``, the log-prob that carries the gradient; everything else, ``target`` included,
stays frozen. So the slope of that function is the gradient a rule must have, whatever it detaches.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from brace_rl.actor import ActorBatch

TENSORS = ("target_logprobs", "behavior_logprobs", "proximal_logprobs", "advantages", "behavior_entropy", "version_lag")

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "ppo": ("ppo", {}),
    "ppo-dual": ("ppo", {"dual_clip": 1.5, "clip_low": 0.1, "clip_high": 0.1}),
    "ppo-U": ("ppo", {"edge": "U"}),
    "decoupled": ("decoupled", {"weight_cap": 1.1}),
    "decoupled-clamp": ("decoupled", {"weight_cap": 1.1, "over_cap": "clamp"}),
    "a3po": ("a3po", {"weight_cap": 1.2}),
    "a3po-clamp": ("a3po", {"weight_cap": 1.2, "over_cap": "clamp"}),
    "ppo_ewma": ("ppo_ewma", {"ratio_cap": 1.3}),
    "ppo_ewma_revised": ("ppo_ewma_revised", {"low": 0.8, "high": 1.25}),
    "icepop": ("icepop", {"low": 0.8, "high": 1.25}),
    "icepop-E": ("icepop", {"edge": "E", "low": 0.8, "high": 1.25}),
    "kpop": ("kpop", {"phi": 0.01}),
    "kpop-E": ("kpop", {"edge": "E", "phi": 0.02}),
    "estr": ("estr", {"tau": 0.1}),
    "estr-B": ("estr", {"tau": 0.1, "edge": "B", "eps": 0.0}),
    "dis": ("dis", {"eps_low": 0.2, "eps_high": 0.3}),
    "dis-U": ("dis", {"edge": "U", "eps_low": 0.2, "eps_high": 0.3}),
    "tis": ("tis", {"cap": 1.1}),
    "tis-sequence": ("tis", {"level": "sequence", "cap": 1.3}),
    "tis-geometric": ("tis", {"level": "geometric", "low": 0.95, "high": 1.05}),
    "gspo": ("gspo", {"clip_low": 0.03, "clip_high": 0.04}),
    "gspo-U": ("gspo", {"edge": "U"}),
    "cispo": ("cispo", {"cap": 1.2}),
    "cispo-U": ("cispo", {"edge": "U"}),
    "m2po": ("m2po", {"tau": 0.02}),
    "m2po-B": ("m2po", {"edge": "B", "tau": 0.01}),
}
"""Name -> rule and options, tight enough that a batch of :func:`random_batch` meets every branch."""

REJECTING = tuple(
    name
    for name, (rule, options) in CASES.items()
    if rule in ("ppo_ewma_revised", "icepop", "kpop", "estr", "dis", "m2po")
    or options.get("level") == "geometric"
    or (rule in ("decoupled", "a3po") and options.get("over_cap") != "clamp")
)
"""The cases that can drop a token."""

every_case = pytest.mark.parametrize("case", list(CASES))


def random_batch(seed: int, rows: int = 4, columns: int = 9, spread: float = 0.25, dtype=torch.float64) -> ActorBatch:
    g = torch.Generator().manual_seed(seed)

    def normal() -> torch.Tensor:
        return torch.randn(rows, columns, generator=g, dtype=torch.float64)

    behavior = -0.02 - 3 * torch.rand(rows, columns, generator=g, dtype=torch.float64)
    proximal = (behavior + spread * normal()).clamp(max=-0.001)
    target = (proximal + spread * normal()).clamp(max=-0.001)
    mask = torch.rand(rows, columns, generator=g) < 0.75
    mask[0, 0] = True
    return ActorBatch(
        target_logprobs=target.to(dtype).requires_grad_(),
        behavior_logprobs=behavior.to(dtype),
        proximal_logprobs=proximal.to(dtype),
        advantages=normal().to(dtype),
        behavior_entropy=(2 * torch.rand(rows, columns, generator=g, dtype=torch.float64)).to(dtype),
        version_lag=torch.randint(0, 6, (rows, columns), generator=g),
        loss_mask=mask,
    )


def with_target(batch: ActorBatch, **changes: Any) -> ActorBatch:
    """A copy whose target is a leaf of its own."""
    target = changes.pop("target_logprobs", batch.target_logprobs)
    return replace(batch, target_logprobs=target.detach().clone().requires_grad_(), **changes)


@dataclass(frozen=True)
class Token:
    target: float
    behavior: float
    proximal: float
    advantage: float
    entropy: float
    lag: float

    @property
    def ratios(self) -> dict[str, float]:
        """Log-ratio of each edge."""
        return {
            "B": self.proximal - self.behavior,
            "U": self.target - self.proximal,
            "E": self.target - self.behavior,
        }


def tokens_of(batch: ActorBatch) -> list[list[tuple[int, Token]]]:
    """Of each row, the columns in the mask and their tokens."""
    columns = [getattr(batch, name).tolist() for name in TENSORS]
    return [
        [(t, Token(*(column[b][t] for column in columns))) for t, kept in enumerate(row) if kept]
        for b, row in enumerate(batch.loss_mask.tolist())
    ]


def reference(rule: str, batch: ActorBatch, options: dict[str, Any]) -> tuple[float, list[list[float]]]:
    """Loss, and its gradient with respect to ``target_logprobs`` by central differences."""
    rows = tokens_of(batch)
    count = max(1, sum(len(row) for row in rows))
    all_tokens = [token for row in rows for _, token in row]
    total, gradient = 0.0, [[0.0] * batch.loss_mask.shape[1] for _ in rows]
    step = 1e-6
    for b, row in enumerate(rows):
        response = [token for _, token in row]
        for t, token in row:
            loss = TOKEN_LOSSES[rule](token, response, all_tokens, options)
            total += loss(token.target)
            gradient[b][t] = (loss(token.target + step) - loss(token.target - step)) / (2 * step) / count
    return total / count, gradient


Loss = Callable[[float], float]


def _ppo_clip(x: float, anchor: float, advantage: float, o: dict[str, Any]) -> float:
    ratio = math.exp(x - anchor)
    clipped = min(max(ratio, 1 - o.get("clip_low", 0.20)), 1 + o.get("clip_high", 0.28))
    loss = max(-advantage * ratio, -advantage * clipped)
    if o.get("dual_clip") is not None and advantage < 0:
        loss = min(loss, -advantage * o["dual_clip"])
    return loss


def _clip_anchor(a: Token, mask_edge: str) -> float:
    return a.proximal if mask_edge == "B" else a.behavior


def _ppo(a: Token, _response: list[Token], _batch: list[Token], o: dict[str, Any]) -> Loss:
    anchor = a.proximal if o.get("edge") == "U" else a.behavior
    return lambda x: _ppo_clip(x, anchor, a.advantage, o)


def _decoupled(a: Token, _response: list[Token], _batch: list[Token], o: dict[str, Any]) -> Loss:
    weight, cap = math.exp(a.proximal - a.behavior), o.get("weight_cap", 5.0)
    if weight > cap:
        weight = cap if o.get("over_cap") == "clamp" else 0.0
    return lambda x: weight * _ppo_clip(x, a.proximal, a.advantage, o)


def _a3po(a: Token, response: list[Token], batch: list[Token], o: dict[str, Any]) -> Loss:
    alpha = (a.lag - 1) / a.lag if a.lag > 0 else 0.0
    proximal = a.behavior + alpha * (a.target - a.behavior)
    return _decoupled(replace(a, proximal=proximal), response, batch, o)


def _ppo_ewma(a: Token, _response: list[Token], _batch: list[Token], o: dict[str, Any]) -> Loss:
    behavior = max(a.behavior, a.target - math.log(o.get("ratio_cap", 100.0)))
    return lambda x: math.exp(a.proximal - behavior) * _ppo_clip(x, a.proximal, a.advantage, o)


def _ppo_ewma_revised(a: Token, _response: list[Token], _batch: list[Token], o: dict[str, Any]) -> Loss:
    kept = o["low"] <= math.exp(a.proximal - a.behavior) <= o["high"]
    return lambda x: kept * _ppo_clip(x, a.proximal, a.advantage, o)


def _icepop(a: Token, _response: list[Token], _batch: list[Token], o: dict[str, Any]) -> Loss:
    edge = o.get("edge", "B")
    ratio = math.exp(a.ratios[edge])
    kept = o.get("low", 0.5) <= ratio <= o.get("high", 5.0)
    weight = ratio if edge == "B" else 1.0
    return lambda x: kept * weight * _ppo_clip(x, _clip_anchor(a, edge), a.advantage, o)


def _bernoulli_kl(p: float, q: float) -> float:
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


def _kpop(a: Token, _response: list[Token], _batch: list[Token], o: dict[str, Any]) -> Loss:
    edge, phi = o.get("edge", "B"), o.get("phi", 2.0)
    p, q = math.exp(a.proximal if edge == "B" else a.target), math.exp(a.behavior)
    kept = _bernoulli_kl(p, q) <= phi and _bernoulli_kl(q, p) <= phi
    return lambda x: kept * _ppo_clip(x, _clip_anchor(a, edge), a.advantage, o)


def _estr(a: Token, _response: list[Token], _batch: list[Token], o: dict[str, Any]) -> Loss:
    edge = o.get("edge", "E")
    kept = a.ratios[edge] ** 2 / (a.entropy + o.get("eps", 0.01)) <= o["tau"]
    return lambda x: kept * _ppo_clip(x, _clip_anchor(a, edge), a.advantage, o)


def _dis(a: Token, _response: list[Token], _batch: list[Token], o: dict[str, Any]) -> Loss:
    ratio = math.exp(a.ratios[o.get("edge", "E")])
    weight = ratio if 1 - o.get("eps_low", 0.3) < ratio < 1 + o.get("eps_high", 5.0) else 0.0
    return lambda x: -weight * a.advantage * x


def _tis(a: Token, response: list[Token], _batch: list[Token], o: dict[str, Any]) -> Loss:
    ratios = [y.ratios["B"] for y in response]
    level = o.get("level", "token")
    if level == "geometric":
        weight = float(o.get("low", 0.999) <= math.exp(sum(ratios) / len(ratios)) <= o.get("high", 1.001))
    else:
        weight = min(math.exp(a.ratios["B"] if level == "token" else sum(ratios)), o.get("cap", 2.0))
    return lambda x: weight * _ppo_clip(x, a.proximal, a.advantage, o)


def _gspo(a: Token, response: list[Token], _batch: list[Token], o: dict[str, Any]) -> Loss:
    o = {"clip_low": 3e-4, "clip_high": 4e-4, **o}
    mean = sum(y.ratios[o.get("edge", "E")] for y in response) / len(response)
    return lambda x: _ppo_clip(mean + x - a.target, 0.0, a.advantage, o)


def _cispo(a: Token, _response: list[Token], _batch: list[Token], o: dict[str, Any]) -> Loss:
    weight = min(math.exp(a.ratios[o.get("edge", "E")]), o.get("cap", 5.0))
    return lambda x: -weight * a.advantage * x


def _m2po(a: Token, _response: list[Token], batch: list[Token], o: dict[str, Any]) -> Loss:
    edge = o.get("edge", "E")
    rest = sorted(batch, key=lambda y: y.ratios[edge] ** 2)
    while rest and sum(y.ratios[edge] ** 2 for y in rest) / len(rest) >= o.get("tau", 0.04):
        rest.pop()
    kept = any(y is a for y in rest)
    return lambda x: -kept * a.advantage * math.exp(x - _clip_anchor(a, edge))


TOKEN_LOSSES = {
    "ppo": _ppo,
    "decoupled": _decoupled,
    "a3po": _a3po,
    "ppo_ewma": _ppo_ewma,
    "ppo_ewma_revised": _ppo_ewma_revised,
    "icepop": _icepop,
    "kpop": _kpop,
    "estr": _estr,
    "dis": _dis,
    "tis": _tis,
    "gspo": _gspo,
    "cispo": _cispo,
    "m2po": _m2po,
}
