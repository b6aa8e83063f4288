"""Log-probs of tokens straight from hidden states: the logits of all tokens never exist at once.

Logits of 16,384 tokens over a vocabulary of 152,000 are 10 GB in float32, and a backward pass wants several tensors of
that size. Here they are made for a few hundred tokens at a time, in the forward pass and again in the backward pass.
What is kept in between has one number per token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK_BYTES = 2**27
"""Size of one chunk's logits. Two or three tensors of it exist at a time."""


@dataclass(frozen=True)
class LogitForm:
    """How logits follow from the output of the head's linear map ``x``.

    ``z = cap * tanh(scale * x / cap) / temperature``, or ``z = scale * x / temperature`` without a cap.

    Attributes:
        soft_cap: final soft cap of the logits (Gemma 2, arXiv 2408.00118); None for none.
    """

    temperature: float = 1.0
    scale: float = 1.0
    soft_cap: float | None = None


class KeptSets:
    """Token ids that survived top-k and top-p, per scored token.

    Args:
        kept: for each of the ``N`` tokens its ids.
    """

    def __init__(self, kept: Sequence[Sequence[int]], device: torch.device) -> None:
        sizes = torch.tensor([len(ids) for ids in kept], dtype=torch.long)
        self._ends = [0, *sizes.cumsum(0).tolist()]
        self._ids = torch.tensor([token for ids in kept for token in ids], dtype=torch.long, device=device)
        self._owners = torch.arange(len(kept)).repeat_interleave(sizes).to(device)

    def cut_from(self, logits: Tensor, rows: slice) -> None:
        """Set the logits ``[n, vocabulary]`` of what the tokens ``rows`` did not keep to minus infinity, in place."""
        part = slice(self._ends[rows.start], self._ends[rows.stop])
        dropped = torch.ones(logits.shape, dtype=torch.bool, device=logits.device)
        dropped[self._owners[part] - rows.start, self._ids[part]] = False
        logits.masked_fill_(dropped, float("-inf"))


def head_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tokens: Tensor,
    *,
    form: LogitForm,
    kept: KeptSets | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> tuple[Tensor, Tensor]:
    """Log-probs of ``tokens`` and entropies, chunk by chunk.

    Args:
        hidden: ``[N, H]`` last hidden state where each token is predicted.
        weight: ``[vocabulary, H]`` of the output head.
        bias: ``[vocabulary]`` or None.
        tokens: ``[N]`` ids.
        form: how logits follow from the head's output.
        kept: log-probs are renormalised over these sets; entropies are not.
        chunk_bytes: size of one chunk's logits.

    Returns:
        ``[N]`` log-probs, whose gradient reaches ``hidden``, ``weight`` and ``bias``; ``[N]`` entropies in nats, which
        carry none. Float32 or better. Products with the head are made in autocast's dtype where that is on.
    """
    arguments = (hidden, weight, bias, tokens, form, kept, chunk_bytes)
    logprobs, entropies = _HeadLogprobs.apply(*arguments)  # type: ignore[no-untyped-call]
    return logprobs, entropies


class _HeadLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tokens: Tensor,
        form: LogitForm,
        kept: KeptSets | None,
        chunk_bytes: int,
    ) -> tuple[Tensor, Tensor]:
        device = hidden.device.type
        product = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
        head = _Head(weight, bias, form, product)
        logprobs = torch.empty(len(tokens), dtype=head.dtype, device=hidden.device)
        entropies, normalizers = torch.empty_like(logprobs), torch.empty_like(logprobs)
        chunks = list(_chunks(len(tokens), len(weight) * logprobs.element_size(), chunk_bytes))
        with torch.autocast(device, enabled=False):
            for rows in chunks:
                logits = head.logits(hidden[rows])
                chosen = logits.gather(1, tokens[rows, None]).squeeze(1)
                normalizer = logits.logsumexp(1)
                probabilities = (logits - normalizer.unsqueeze(1)).exp_()
                entropies[rows] = torch.special.entr(probabilities, out=probabilities).sum(1)
                del probabilities
                if kept is not None:
                    kept.cut_from(logits, rows)
                    normalizer = logits.logsumexp(1)
                logprobs[rows] = chosen - normalizer
                normalizers[rows] = normalizer
        ctx.save_for_backward(hidden, weight, bias, tokens, normalizers)
        ctx.form, ctx.kept, ctx.product, ctx.chunks = form, kept, product, chunks
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, tokens, normalizers = ctx.saved_tensors
        head = _Head(weight, bias, ctx.form, ctx.product)
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        for_hidden = torch.empty_like(hidden) if needs_hidden else None
        for_weight = torch.zeros_like(weight) if needs_weight else None
        for_bias = torch.zeros_like(bias) if needs_bias else None
        for rows in ctx.chunks:
            logits = head.logits(hidden[rows])
            slope = head.slope(logits)
            if ctx.kept is not None:
                ctx.kept.cut_from(logits, rows)
            # d log p(token) / d z = [is the token] - p, over the kept set.
            gradient = gradients[0][rows].unsqueeze(1)
            change = logits.sub_(normalizers[rows].unsqueeze(1)).exp_().mul_(-gradient)
            change.scatter_add_(1, tokens[rows, None], gradient)
            change = change.mul_(slope).to(ctx.product)
            if for_hidden is not None:
                for_hidden[rows] = change @ head.weight
            if for_weight is not None and for_weight.dtype == change.dtype:
                for_weight.addmm_(change.t(), hidden[rows].to(change.dtype))
            elif for_weight is not None:
                for_weight += change.t() @ hidden[rows].to(change.dtype)
            if for_bias is not None:
                for_bias += change.sum(0)
        return for_hidden, for_weight, for_bias, None, None, None, None


class _Head:
    """The output head in the dtype its products are made in.

    Attributes:
        dtype: of logits, float32 or better.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, form: LogitForm, product: torch.dtype) -> None:
        self.weight = weight.to(product)
        self.dtype = torch.promote_types(product, torch.float32)
        self._bias = None if bias is None else bias.to(product)
        self._form = form

    def logits(self, hidden: Tensor) -> Tensor:
        """``[n, vocabulary]`` tempered logits ``z``, a tensor of their own."""
        form = self._form
        logits = F.linear(hidden.to(self.weight.dtype), self.weight, self._bias).to(self.dtype)
        if form.soft_cap is None:
            return logits if form.scale == form.temperature else logits.mul_(form.scale).div_(form.temperature)
        return logits.mul_(form.scale / form.soft_cap).tanh_().mul_(form.soft_cap / form.temperature)

    def slope(self, logits: Tensor) -> Tensor | float:
        """``dz / dx`` where the tempered logits are ``logits``."""
        form = self._form
        straight = form.scale / form.temperature
        if form.soft_cap is None:
            return straight
        return (logits * (form.temperature / form.soft_cap)).square_().neg_().add_(1.0).mul_(straight)


def _chunks(count: int, row_bytes: int, chunk_bytes: int) -> Iterator[slice]:
    step = max(1, chunk_bytes // row_bytes)
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))
