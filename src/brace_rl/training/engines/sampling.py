"""Drawing tokens: counter-based uniforms, the truncated distribution, inverse CDF. No state, no global generator."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_UNIFORM_BITS = 48
"""Resolution of a uniform. Small enough that ``u * total`` rounds to less than ``total`` in float64."""


@dataclass(frozen=True)
class Draw:
    """One token per row, and what it was drawn from.

    Attributes:
        token_ids: ``[B]`` int64.
        logprobs: ``[B]`` float32, of the token under the distribution it was drawn from.
        entropies: ``[B]`` float32, nats, of the tempered distribution before top-k and top-p.
        kept: ``[B, V]`` bool, the tokens top-k and top-p left in (all true in rows that cut nothing); None when no row
            cuts anything.
    """

    token_ids: Tensor
    logprobs: Tensor
    entropies: Tensor
    kept: Tensor | None


def counter_uniforms(*, seeds: Tensor, positions: Tensor) -> Tensor:
    """Uniforms in (0, 1) that are a function of ``(seed, position)`` alone.

    The generator is SplitMix64 (Steele, Lea and Flood, 2014) in wrapping int64 arithmetic: the seed is mixed once to
    name a stream, the position steps along it.

    Args:
        seeds: ``[B]`` int64.
        positions: ``[B]`` int64, absolute index of the token to be drawn in its sequence.

    Returns:
        ``[B]`` float64, never 0 and never 1.
    """
    stream = _mix(seeds + _signed(_GOLDEN_GAMMA))
    bits = _mix(stream + (positions + 1) * _signed(_GOLDEN_GAMMA))
    counts = _shift_right(bits, 64 - _UNIFORM_BITS)
    return (counts.double() + 0.5) * 2.0**-_UNIFORM_BITS


def draw(
    logits: Tensor,
    *,
    uniforms: Tensor,
    temperatures: Tensor,
    top_ps: Tensor | None = None,
    top_ks: Tensor | None = None,
) -> Draw:
    """Draw one token per row from softmax(logits / temperature), cut by top-k, then by top-p, then renormalised.

    top-k keeps the ``k`` likeliest tokens. top-p keeps, of those, the smallest set of likeliest tokens whose share of
    their mass reaches ``p``. Ties go to the smaller id. Rows whose temperature is 0 take the likeliest token; their
    log-prob and entropy are those of softmax(logits).

    Args:
        logits: ``[B, V]``, any floating dtype; computed in float32 or better.
        uniforms: ``[B]`` float64 in (0, 1); the draw is the inverse CDF, over token ids in order, at this point.
        temperatures: ``[B]`` float32, at least 0.
        top_ps: ``[B]`` float32 in (0, 1], or None when no row cuts anything; 1 keeps all.
        top_ks: ``[B]`` int64, given with ``top_ps``; 0 keeps all.
    """
    greedy = temperatures == 0
    scaled = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scaled = scaled / torch.where(greedy, 1.0, temperatures).to(scaled.dtype).unsqueeze(-1)
    logprobs = torch.log_softmax(scaled, dim=-1)
    probs = logprobs.exp()
    # Clamped so that a token without mass counts 0 * finite = 0, not 0 * -inf.
    entropies = -(probs * logprobs.clamp_min(torch.finfo(logprobs.dtype).min)).sum(-1)
    kept = None
    if top_ps is not None and top_ks is not None:
        kept = _kept_tokens(probs, top_ps=top_ps, top_ks=top_ks) | greedy.unsqueeze(-1)
        probs = probs.masked_fill(~kept, 0.0)
    cdf = probs.cumsum(-1, dtype=torch.float64)
    # The first id whose cumulative mass exceeds the target always has positive mass itself.
    drawn = torch.searchsorted(cdf, uniforms.unsqueeze(-1) * cdf[:, -1:], right=True)
    # A row of NaN finds no such id; keeping it in range lets the caller see the NaN log-prob instead of a bad index.
    drawn = drawn.clamp_max_(logits.shape[-1] - 1)
    token_ids = torch.where(greedy.unsqueeze(-1), logprobs.argmax(-1, keepdim=True), drawn)
    token_logprobs = logprobs.gather(-1, token_ids).squeeze(-1)
    if kept is not None:
        token_logprobs = token_logprobs - logprobs.masked_fill(~kept, -torch.inf).logsumexp(-1)
    return Draw(token_ids=token_ids.squeeze(-1), logprobs=token_logprobs, entropies=entropies, kept=kept)


def _kept_tokens(probs: Tensor, *, top_ps: Tensor, top_ks: Tensor) -> Tensor:
    """``[B, V]`` bool: what top-k, then top-p over the renormalised rest, leave in."""
    vocabulary = probs.shape[-1]
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(vocabulary, device=probs.device)
    in_top_k = ranks < torch.where(top_ks > 0, top_ks, vocabulary).unsqueeze(-1)
    mass = ordered.masked_fill(~in_top_k, 0.0).cumsum(-1, dtype=torch.float64)
    # A token stays while the likelier ones fall short of p; compared against p * total, so nothing is divided.
    likelier = mass - ordered
    in_top_p = (likelier < top_ps.double().unsqueeze(-1) * mass[:, -1:]) | (top_ps >= 1).unsqueeze(-1)
    in_top_p[:, 0] = True
    return torch.zeros_like(in_top_p).scatter(-1, order, in_top_k & in_top_p)


def _mix(state: Tensor) -> Tensor:
    state = (state ^ _shift_right(state, 30)) * _signed(_MIX_1)
    state = (state ^ _shift_right(state, 27)) * _signed(_MIX_2)
    return state ^ _shift_right(state, 31)


def _shift_right(bits: Tensor, places: int) -> Tensor:
    """Logical shift: torch shifts int64 arithmetically, so the copies of the sign are cleared."""
    return (bits >> places) & ((1 << (64 - places)) - 1)


def _signed(constant: int) -> int:
    """An unsigned 64-bit constant as the int64 with the same bits."""
    return constant - (1 << 64) if constant >> 63 else constant
