"""What the Ray backend needs no Ray for: weights in one array, and the line that says Ray is missing."""

from __future__ import annotations

import pickle

import pytest
import torch

from brace_rl.config import Config
from brace_rl.errors import BraceError
from brace_rl.training import run
from brace_rl.training.backends import ray_cluster, ray_workers
from brace_rl.training.backends.ray_actor import PackedWeights

WEIGHTS = {
    "matrix": torch.arange(6, dtype=torch.float32).reshape(2, 3).T,
    "half": torch.tensor([1.5, -2.0, 0.25], dtype=torch.bfloat16),
    "count": torch.tensor(7),
    "none": torch.empty(0, 4),
}


def test_packed_weights_come_back_exactly_and_do_not_follow_the_source() -> None:
    source = {name: tensor.clone() for name, tensor in WEIGHTS.items()}
    packed = PackedWeights.of(source)
    source["half"].zero_()
    tensors = pickle.loads(pickle.dumps(packed)).tensors()
    assert tensors.keys() == WEIGHTS.keys()
    for name, tensor in WEIGHTS.items():
        assert tensors[name].dtype == tensor.dtype
        assert torch.equal(tensors[name], tensor)


def test_read_only_memory_is_read_without_a_warning(recwarn: pytest.WarningsRecorder) -> None:
    packed = PackedWeights.of(WEIGHTS)
    packed.data.flags.writeable = False
    assert torch.equal(packed.tensors()["half"], WEIGHTS["half"])
    assert not recwarn.list


def test_without_ray_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "find_spec", lambda name: None)
    with pytest.raises(BraceError, match=r"Ray is not installed; run: pip install 'brace-rl\[ray\]'") as caught:
        ray_workers.RayBackend(None, workers=1, timeout_s=1.0)
    assert "\n" not in str(caught.value)


def test_gpus_that_this_machine_does_not_have_are_refused_before_anything_is_done(monkeypatch):
    monkeypatch.setattr(run, "require_ray", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    config = Config.model_validate({"backend": {"kind": "ray", "workers": 4, "gpus_per_worker": 0.5}})
    with pytest.raises(BraceError, match="4 workers ask for 2 GPUs, this machine has 1; lower it"):
        run._check_backend(config)
    elsewhere = config.model_copy(update={"backend": config.backend.model_copy(update={"address": "auto"})})
    assert run._check_backend(elsewhere) is None
