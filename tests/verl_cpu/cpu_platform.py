"""Make verl, which asks for a GPU, run on a CPU. verl imports this in every process (VERL_USE_EXTERNAL_MODULES).

Nothing of this belongs in what users install. It does not touch targets, advantages or losses.
"""

import functools
import os
import types
import zlib
from contextlib import contextmanager

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

from brace_rl.integrations.when_imported import when_imported


class CpuDevice(types.ModuleType):
    """``torch.cpu``, and answers for what a CPU does not have: no memory of its own, nothing to wait for."""

    def __getattr__(self, name):
        return getattr(torch.cpu, name)

    def empty_cache(self):
        pass

    def ipc_collect(self):
        pass

    def memory_allocated(self, *_):
        return 0

    max_memory_allocated = max_memory_reserved = memory_reserved = memory_allocated

    def mem_get_info(self, *_):
        return 1 << 33, 1 << 33

    def get_rng_state(self, *_):
        return torch.get_rng_state()

    def set_rng_state(self, state, *_):
        torch.set_rng_state(state)

    def set_device(self, *_):
        pass

    def device_count(self):
        return 1

    def get_device_name(self, *_):
        return "cpu"


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    device_name = "cpu"
    vendor_name = "cpu"
    device_module = CpuDevice("cpu_device")

    def is_available(self):
        return True

    def current_device(self):
        # verl moves tensors `.to(get_device_id())`: a number would mean a GPU.
        return "cpu"

    def device_count(self):
        return 1

    def set_device(self, device_index):
        pass

    def synchronize(self, device_index=None):
        pass

    def manual_seed(self, seed):
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def set_allocator_settings(self, settings):
        pass

    def empty_cache(self):
        pass

    def get_device_capability(self, device_index=0):
        return None, None

    def communication_backend_name(self):
        return "gloo"

    def visible_devices_envvar(self):
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg):
        yield

    def profiler_start(self):
        pass

    profiler_stop = profiler_start

    def ray_resource_name(self):
        # Ray is told of GPUs that are not there, so that verl's placement works as it is.
        return "GPU"

    def ray_noset_envvars(self):
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self):
        return False

    def cudart(self):
        return None


def one_gloo_group(module):
    """verl names a backend for the CPU and one for the device, which here are the same."""
    original = module.initialize_global_process_group_ray

    @functools.wraps(original)
    def initialize(timeout_second=None, backend=None):
        return original(timeout_second=timeout_second, backend="cpu:gloo")

    module.initialize_global_process_group_ray = initialize


def seeded_critic_without_flash(module):
    """verl's critic asks for flash attention by name, and draws its head from a generator that nobody has seeded."""
    original = module.load_valuehead_model

    @functools.wraps(original)
    def load_valuehead_model(*args, **kwargs):
        from transformers import AutoModelForTokenClassification as AutoModel

        from_pretrained = AutoModel.from_pretrained
        AutoModel.from_pretrained = lambda *a, **k: from_pretrained(*a, **{**k, "attn_implementation": "sdpa"})
        try:
            with torch.random.fork_rng():
                torch.manual_seed(0)
                return original(*args, **kwargs)
        finally:
            AutoModel.from_pretrained = from_pretrained

    module.load_valuehead_model = load_valuehead_model


def reload_weights(module):
    """vLLM lays weights out for the CPU while it loads them; they cannot be copied in, but loaded again."""

    def update_weights_from_ipc(self, peft_config=None, base_sync_done=False, use_shm=False):
        from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver

        received = []
        receiver = BucketedWeightReceiver(
            zmq_handle=self._get_zmq_handle(), device=torch.device("cpu"), use_shm=use_shm
        )
        receiver.receive_weights(
            on_bucket_received=lambda weights, is_last: received.extend((name, x.clone()) for name, x in weights)
        )
        self.model_runner.reload_weights(weights_iterator=iter(received))

    module.vLLMColocateWorkerExtension.update_weights_from_ipc = update_weights_from_ipc


def seeded_requests(module):
    """Draws depend on the prompt and the version of the weights, not on what else is being decoded."""
    original = module.vLLMHttpServer.generate

    @functools.wraps(original)
    async def generate(self, prompt_ids, sampling_params, *args, **kwargs):
        text = repr((list(prompt_ids), self.global_steps)).encode()
        return await original(self, prompt_ids, {"seed": zlib.crc32(text), **sampling_params}, *args, **kwargs)

    module.vLLMHttpServer.generate = generate


when_imported("verl.utils.distributed", one_gloo_group)
when_imported("verl.utils.model", seeded_critic_without_flash)
when_imported("verl.workers.rollout.vllm_rollout.utils", reload_weights)
when_imported("verl.workers.rollout.vllm_rollout.vllm_async_server", seeded_requests)

if os.environ.get("VERL_CPU_DUMP"):
    import dump

    when_imported("verl.trainer.ppo.v1.trainer_base", dump.install)
