"""Log-probs of sampled tokens under the distribution they were sampled from."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from brace_rl.errors import ModelError
from brace_rl.training.batch import Batch
from brace_rl.training.head_logprobs import KeptSets, LogitForm, head_logprobs

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_PROBED_TOKENS = 3


class TokenLogprobs(NamedTuple):
    """``[B, L-1]`` each, column ``i`` about token ``i + 1``; NaN outside the policy mask.

    Attributes:
        logprobs: of the sampled token; carries the gradient.
        entropies: of the tempered distribution before any cut, nats; no gradient.
    """

    logprobs: Tensor
    entropies: Tensor


class TokenScorer(nn.Module):
    """A causal language model that scores the policy tokens of a batch without making ``[B, L, vocabulary]`` logits.

    Args:
        model: its logits must be a linear head on its last hidden state, scaled or soft-capped as its configuration
            says. Tied embeddings and a bias are fine.
        temperature: the one the tokens were sampled under.

    Raises:
        ModelError: the logits of the model are something else. Found out by one forward pass over a few tokens.
    """

    def __init__(self, model: PreTrainedModel, *, temperature: float) -> None:
        super().__init__()
        self.model = model
        self._form = _logit_form(model, temperature)

    @property
    def dtype(self) -> torch.dtype:
        """Of the model's weights."""
        dtype: torch.dtype = self.model.dtype
        return dtype

    def forward(self, batch: Batch) -> TokenLogprobs:
        """Score ``batch``. Where it has kept sets, pi is renormalised over the same set as mu."""
        mask = batch.policy_mask
        hidden = _last_hidden(self.model, batch.input_ids, batch.attention_mask)
        head = self.model.get_output_embeddings()
        logprobs, entropies = head_logprobs(
            hidden[:, :-1][mask],
            head.weight,
            head.bias,
            batch.input_ids[:, 1:][mask],
            form=self._form,
            kept=_kept_sets(batch),
        )
        outside = torch.full(mask.shape, float("nan"), dtype=logprobs.dtype, device=mask.device)
        return TokenLogprobs(outside.masked_scatter(mask, logprobs), outside.masked_scatter(mask, entropies))


def _last_hidden(model: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    hidden: Tensor = model.base_model(
        input_ids=input_ids, attention_mask=attention_mask, use_cache=False
    ).last_hidden_state
    return hidden


def _kept_sets(batch: Batch) -> KeptSets | None:
    if batch.kept_ids is None:
        return None
    mask = batch.policy_mask.tolist()
    kept = [
        ids for row, flags in zip(batch.kept_ids, mask, strict=True) for ids, on in zip(row, flags, strict=True) if on
    ]
    return KeptSets(kept, batch.input_ids.device)


@torch.no_grad()
def _logit_form(model: PreTrainedModel, temperature: float) -> LogitForm:
    """The form under which the head's output, as the configuration describes it, gives the model's own logits."""
    head, name = model.get_output_embeddings(), type(model).__name__
    if not isinstance(head, nn.Linear):
        raise ModelError(f"{name}: its output head is {type(head).__name__}, not a linear layer, and cannot be scored")
    config = model.config.get_text_config()
    soft_cap = getattr(config, "final_logit_softcapping", None)
    input_ids = torch.arange(_PROBED_TOKENS, device=model.device).unsqueeze(0)
    mask = torch.ones_like(input_ids)
    expected = model(input_ids=input_ids, attention_mask=mask, use_cache=False).logits
    output = head(_last_hidden(model, input_ids, mask))
    for scale in _possible_scales(config):
        logits = scale * output if soft_cap is None else soft_cap * (scale / soft_cap * output).tanh()
        tolerance = torch.finfo(logits.dtype).eps ** 0.5 * expected.abs().amax()
        if logits.shape == expected.shape and bool((logits - expected).abs().amax() <= tolerance):
            return LogitForm(temperature=temperature, scale=scale, soft_cap=soft_cap)
    raise ModelError(
        f"{name}: its logits are not its output head on its last hidden state, scaled or soft-capped as its "
        "configuration says, so its tokens cannot be scored; use a model whose logits are"
    )


def _possible_scales(config: object) -> list[float]:
    """Factors that configurations of ``transformers`` know between head and logits; 1 is tried last."""
    values = {name: getattr(config, name, None) for name in ("logit_scale", "lm_head_multiplier", "logits_scaling")}
    given = {name: float(value) for name, value in values.items() if isinstance(value, int | float) and value}
    # Some models divide by `logits_scaling`, others multiply.
    divided = [1 / given["logits_scaling"]] if "logits_scaling" in given else []
    return [*divided, *given.values(), 1.0]
