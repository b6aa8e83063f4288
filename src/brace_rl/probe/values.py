"""What the critic says of states."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from brace_rl.config import Config
from brace_rl.probe.states import Response, State
from brace_rl.training.batch import micro_batches
from brace_rl.training.models import Critic

_PAD_ID = 0
"""Stands after the end of a row, where a causal model cannot see it; any id of the vocabulary will do."""


@torch.no_grad()
def state_values(
    responses: Sequence[Response], states: Sequence[State], *, critic: Critic, config: Config
) -> npt.NDArray[np.float64]:
    """``[states]`` the critic before each state's token, computed as the learner does."""
    device = next(critic.parameters()).device
    rows = [(*response.prompt_ids, *response.response_ids) for response in responses]
    columns: dict[int, npt.NDArray[np.float64]] = {}
    for group in micro_batches([len(row) for row in rows], config.optim.micro_batch_tokens):
        width = max(len(rows[i]) for i in group)
        input_ids = torch.tensor([[*rows[i], *[_PAD_ID] * (width - len(rows[i]))] for i in group], device=device)
        mask = torch.tensor([[1] * len(rows[i]) + [0] * (width - len(rows[i])) for i in group], device=device)
        with _autocast(config, device):
            after = critic(input_ids, mask).double().cpu().numpy()
        columns |= {i: after[row] for row, i in enumerate(group)}
    # Column i is the state after token i: the state before a token is in the column before it.
    return np.array([columns[s.response][len(responses[s.response].prompt_ids) + s.cut - 1] for s in states])


def _autocast(config: Config, device: torch.device) -> contextlib.AbstractContextManager[object]:
    if config.model.dtype == "float32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)
