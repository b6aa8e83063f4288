"""A short supervised start on transcripts, so that reinforcement learning has something to select from."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from brace_rl.config import Config
from brace_rl.tasks.base import Task, Transcript
from brace_rl.training.types import derive_seed

IGNORED = -100
"""Label of tokens that carry no loss: prompts, observations, padding."""

WARMUP_SHARE = 0.1
"""Share of the steps over which the learning rate rises; it falls linearly to zero over the rest."""


def warm_start(
    actor: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    config: Config,
    report: Callable[[int, float], None] = lambda step, loss: None,
) -> None:
    """Train ``actor`` in place on ``config.warm_start.steps`` batches of demonstrations.

    The loss is the mean cross-entropy of the tokens the policy writes; prompts and observations are only read.
    ``report(step, loss)`` is called now and then. The model stays in the mode it is in: loaded models are in eval mode,
    and dropout, which draws from the global generator, would make the weights depend on more than the seed.
    """
    settings = config.warm_start
    optimizer = torch.optim.AdamW(
        actor.parameters(), lr=settings.lr, betas=config.optim.betas, weight_decay=config.optim.weight_decay
    )
    transcripts = task.demonstrations(derive_seed(config.run.seed, "demonstrations"), mistakes=settings.mistakes)
    for step in range(settings.steps):
        rows = [_tokenize(t, task, tokenizer) for t in islice(transcripts, settings.batch_size)]
        input_ids, attention_mask, labels = (t.to(actor.device) for t in _pad(rows, int(tokenizer.pad_token_id)))
        logits = actor(input_ids, attention_mask=attention_mask, use_cache=False).logits
        loss = F.cross_entropy(logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
        for group in optimizer.param_groups:
            group["lr"] = settings.lr * _schedule(step, settings.steps)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(actor.parameters(), config.optim.max_grad_norm)
        optimizer.step()
        if (step + 1) % max(1, settings.steps // 10) == 0:
            report(step + 1, float(loss.detach()))


def _schedule(step: int, steps: int) -> float:
    rise = max(1, round(WARMUP_SHARE * steps))
    return min((step + 1) / rise, (steps - step) / max(1, steps - rise))


def _tokenize(transcript: Transcript, task: Task, tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """(token ids, labels) of one transcript, the end-of-sequence token last."""
    ids = list(task.prompt_ids(transcript.problem, tokenizer))
    labels = [IGNORED] * len(ids)
    for piece in transcript.pieces:
        tokens = tokenizer.encode(piece.text, add_special_tokens=False)
        ids += tokens
        labels += tokens if piece.is_policy else [IGNORED] * len(tokens)
    eos = int(tokenizer.eos_token_id)
    return [*ids, eos], [*labels, eos]


def _pad(rows: list[tuple[list[int], list[int]]], pad: int) -> tuple[Tensor, Tensor, Tensor]:
    """Right-padded (input ids, attention mask, labels). Masks go by length: the pad id may be a real token."""
    width = max(len(ids) for ids, _ in rows)
    gaps = [width - len(ids) for ids, _ in rows]
    input_ids = torch.tensor([ids + [pad] * gap for (ids, _), gap in zip(rows, gaps, strict=True)])
    attention_mask = torch.tensor([[1] * (width - gap) + [0] * gap for gap in gaps])
    labels = torch.tensor([labels + [IGNORED] * gap for (_, labels), gap in zip(rows, gaps, strict=True)])
    return input_ids, attention_mask, labels
