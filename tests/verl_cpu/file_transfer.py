"""A checkpoint engine for a machine without GPUs: weights go from the trainer to separate rollouts through a file.

verl's own engines (NCCL and the like) need GPUs, and its trainer with separate rollouts refuses to do without one.
"""

import asyncio
import os
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
from verl.workers.rollout.utils import ensure_async_iterator

WAIT_SECONDS = 300


@CheckpointEngineRegistry.register("file")
class FileCheckpointEngine(CheckpointEngine):
    def __init__(self, bucket_size, is_master=False, **_):
        self._folder = Path(os.environ["VERL_CPU_TRANSFER"])
        self._is_sender = False

    def prepare(self):
        return {}

    @classmethod
    def build_topology(cls, actor_wg_world_size, rollout_world_size, metadata):
        senders = [rank == 0 for rank in range(actor_wg_world_size)]
        return {"is_sender": senders}, {"is_sender": [False] * rollout_world_size}

    def init_process_group(self, is_sender):
        self._is_sender = is_sender

    def finalize(self):
        pass

    async def send_weights(self, weights, global_steps=None):
        tensors = {}
        async for name, weight in ensure_async_iterator(weights):
            tensors[name] = weight.detach().to("cpu", copy=True).contiguous()
        if self._is_sender:
            self._folder.mkdir(parents=True, exist_ok=True)
            waiting = self._folder / f"{global_steps}.part"
            save_file(tensors, waiting)
            os.replace(waiting, self._file(global_steps))

    async def receive_weights(self, global_steps=None):
        path = self._file(global_steps)
        give_up = time.monotonic() + WAIT_SECONDS
        while not path.exists():
            if time.monotonic() > give_up:
                raise TimeoutError(f"the rollout waited {WAIT_SECONDS} s for the trainer to write {path}")
            await asyncio.sleep(0.05)
        for name, weight in load_file(path).items():
            yield name, torch.as_tensor(weight)

    def _file(self, global_steps):
        return self._folder / f"{global_steps}.safetensors"
