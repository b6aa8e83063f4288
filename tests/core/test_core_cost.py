"""What an estimator may cost: memory beyond its inputs, and nothing that makes a GPU wait for the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from estimators import estimate, every_estimator
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from brace_rl import core

SHAPE = (64, 4096)
MOST_EXTRA_MEMORY = 6.0
"""In units of one float32 input, results included."""


class PeakMemory(TorchDispatchMode):
    """Bytes of the tensors alive at once that came into being inside; inputs do not count."""

    def __init__(self, inputs: list[Tensor]) -> None:
        super().__init__()
        self.peak = 0
        self._known = {x.untyped_storage()._cdata for x in inputs}
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and x.untyped_storage()._cdata not in self._known:
                storage = x.untyped_storage()
                self._alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._alive = {key: held for key, held in self._alive.items() if not held[0].expired()}
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self._alive.values()))
        return result


class Operations(TorchDispatchMode):
    """Names of the operations run, and the devices of the tensors they read or made."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.devices: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.names.add(func.overloadpacket.__name__)
        self.devices |= {x.device.type for x in tree_leaves((args, kwargs, result)) if isinstance(x, Tensor)}
        return result


def batch(shape: tuple[int, int] = SHAPE) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    behavior = -torch.rand(shape, generator=g)
    rewards = torch.zeros(shape)
    rewards[:, 0] = 1.0
    return {
        "values": torch.rand(shape, generator=g),
        "rewards": rewards,
        "behavior_logprobs": behavior,
        "target_logprobs": behavior + 0.1 * torch.randn(shape, generator=g),
        "policy_mask": torch.ones(shape, dtype=torch.bool),
    }


def extra_memory(run: Callable[[dict[str, Tensor]], object], *, holes: bool, given: tuple[Tensor, ...] = ()) -> float:
    inputs = batch()
    if holes:
        inputs["policy_mask"] = (torch.arange(SHAPE[1]) % 576 < 512).repeat(SHAPE[0], 1)
    with PeakMemory([*inputs.values(), *given]) as memory:
        run(inputs)
    return memory.peak / inputs["values"].untyped_storage().nbytes()


def ratios_of(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {k: inputs[k] for k in ("behavior_logprobs", "target_logprobs", "policy_mask")}


def test_the_yardstick_sees_what_is_alive_at_once():
    x = torch.zeros(1000)
    with PeakMemory([x]) as memory:
        y = x + 1.0
        del y
        z = (x + 2.0) * 3.0
    assert memory.peak == 2 * 4000
    assert z[0] == 6.0


@every_estimator
@pytest.mark.parametrize("holes", [False, True], ids=["rows", "tool_spans"])
def test_extra_memory_is_a_few_inputs(estimator, holes, monkeypatch):
    # Chunks as large, beside this batch, as the real ones are beside [64, 16384].
    monkeypatch.setattr("brace_rl.core.layout.CPU_CHUNK_TOKENS", 16_384)
    assert 2.0 <= extra_memory(lambda x: estimate(estimator, x, window=100), holes=holes) <= MOST_EXTRA_MEMORY


@pytest.mark.parametrize("holes", [False, True], ids=["rows", "tool_spans"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_extra_memory_is_as_small_with_a_window_per_state(holes, dtype, monkeypatch):
    monkeypatch.setattr("brace_rl.core.layout.CPU_CHUNK_TOKENS", 16_384)
    windows = core.path_windows(**ratios_of(batch()), budget=3.0).to(dtype)
    assert windows.max() > 30
    given = extra_memory(lambda x: core.brace_targets(**x, window=windows), holes=holes, given=(windows,))
    assert 2.0 <= given <= MOST_EXTRA_MEMORY


@pytest.mark.parametrize("holes", [False, True], ids=["rows", "tool_spans"])
def test_extra_memory_is_as_small_when_the_windows_are_chosen_too(holes, monkeypatch):
    monkeypatch.setattr("brace_rl.core.layout.CPU_CHUNK_TOKENS", 16_384)

    def choose_and_use(x: dict[str, Tensor]) -> None:
        core.brace_targets(**x, window=core.path_windows(**ratios_of(x), budget=3.0))

    assert extra_memory(choose_and_use, holes=holes) <= MOST_EXTRA_MEMORY


WAITS = {"_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select", "unique2", "_unique2"}
"""Operations whose answer, or whose size of answer, the host must have before it can go on."""


def test_unchecked_no_operation_waits_for_the_host_and_none_leaves_the_device():
    """On a device that is not the CPU; meta tensors take the same path as CUDA ones."""
    shape = (3, 40)
    inputs = {k: x.to("meta") for k, x in batch(shape).items()}
    ratios = ratios_of(inputs)
    each = torch.empty(shape, dtype=torch.long, device="meta")
    rows = torch.empty(3, device="meta")
    with Operations() as seen:
        for name in ("brace", "capped", "vtrace", "gae", "monte_carlo"):
            for window in (7, each):
                for ids in (None, each):
                    options = {"window": window, "segment_ids": ids, "gamma": 0.9, "lam": 0.9, "rho_clip": 0.5}
                    estimate(name, inputs, check_inputs=False, **options)
        core.window_weights(**ratios, window=each, check_inputs=False)
        core.path_windows(**ratios, budget=1.0, check_inputs=False)
        core.drift_window(**ratios, eps=0.5, check_inputs=False)
        core.critic_free_advantages(**ratios, returns=rows, baselines=rows, check_inputs=False)
    assert len(seen.names) > 20
    assert not seen.names & WAITS
    assert seen.devices == {"meta"}


def test_the_watch_sees_an_operation_that_waits():
    with Operations() as seen:
        bool(torch.ones(()).gt(0)), torch.ones(2).nonzero()
    assert {"_local_scalar_dense", "nonzero"} <= seen.names & WAITS
