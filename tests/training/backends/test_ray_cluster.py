"""A cluster that is started is not shown the GPU that the trainer computes on."""

import os

import pytest
import torch

from brace_rl.training.backends import ray_cluster


@pytest.mark.parametrize(
    ("ours", "visible", "shown"),
    [
        ("cuda", None, "1,2"),
        ("cuda:1", None, "0,2"),
        ("cuda:1", "GPU-a,GPU-b,GPU-c", "GPU-a,GPU-c"),
        ("cuda:0", "5", ""),
        ("cpu", "5,6", "5,6"),
        ("cpu", None, None),
    ],
)
def test_gpus_but_ours_are_shown_and_then_all_again(ours, visible, shown, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with ray_cluster._hidden(torch.device(ours)):
        assert os.environ.get("CUDA_VISIBLE_DEVICES") == shown
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == visible
