"""Clusters that are joined or started: who listens, and which GPUs are shown."""

import os
import socket

import pytest
import torch

from brace_rl.errors import BraceError
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


def test_an_address_nobody_listens_at_is_refused_at_once_and_one_somebody_does_is_not():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        ray_cluster._check_that_somebody_listens(address)
    with pytest.raises(BraceError, match=f"backend.address: nobody listens at {address} .*start Ray there"):
        ray_cluster._check_that_somebody_listens(address)
    with pytest.raises(BraceError, match=r"nobody listens at 127\.0\.0\.1:99999999"):
        ray_cluster._check_that_somebody_listens("127.0.0.1:99999999")


@pytest.mark.parametrize("address", ["", "auto", "ray://host:10001"])
def test_addresses_of_other_forms_are_left_to_ray(address):
    assert ray_cluster._check_that_somebody_listens(address) is None
