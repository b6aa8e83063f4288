"""Log-probs of sampled tokens under the distribution they were sampled from."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from brace_rl.training.batch import Batch


class TokenLogprobs(NamedTuple):
    """``[B, L-1]`` each, column ``i`` about token ``i + 1``; NaN outside the policy mask.

    Attributes:
        logprobs: of the sampled token; carries the gradient.
        entropies: of the tempered distribution before any cut, nats; no gradient.
    """

    logprobs: Tensor
    entropies: Tensor


def token_logprobs(logits: Tensor, batch: Batch, *, temperature: float) -> TokenLogprobs:
    """Score the policy tokens of ``batch``.

    Args:
        logits: ``[B, L, vocabulary]``, position ``i`` predicts token ``i + 1``.
        batch: the tokens, and the kept sets when sampling cut the distribution. pi is then renormalised over the same
            kept set as mu, so that both live on the same support.
        temperature: the one the tokens were sampled under.
    """
    mask = batch.policy_mask
    tempered = logits[:, :-1][mask].float() / temperature
    tokens = batch.input_ids[:, 1:][mask]
    log_normalizer = tempered.logsumexp(dim=-1)
    with torch.no_grad():
        entropies = torch.special.entr((tempered - log_normalizer.unsqueeze(-1)).exp()).sum(dim=-1)
    if batch.kept_ids is not None:
        log_normalizer = _kept_logsumexp(tempered, batch)
    logprobs = tempered.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) - log_normalizer
    outside = torch.full(mask.shape, float("nan"), device=logits.device)
    return TokenLogprobs(outside.masked_scatter(mask, logprobs), outside.masked_scatter(mask, entropies))


def _kept_logsumexp(tempered: Tensor, batch: Batch) -> Tensor:
    """logsumexp over each policy token's kept ids; ``tempered`` is ``[tokens, vocabulary]``, result ``[tokens]``."""
    assert batch.kept_ids is not None
    mask = batch.policy_mask.tolist()
    kept = [
        ids for row, flags in zip(batch.kept_ids, mask, strict=True) for ids, on in zip(row, flags, strict=True) if on
    ]
    width = max(len(ids) for ids in kept)
    index = torch.tensor([list(ids) + [0] * (width - len(ids)) for ids in kept], device=tempered.device)
    sizes = torch.tensor([len(ids) for ids in kept], device=tempered.device)
    real = torch.arange(width, device=tempered.device) < sizes.unsqueeze(-1)
    return tempered.gather(-1, index).masked_fill(~real, float("-inf")).logsumexp(dim=-1)
