"""Whole SkyRL runs on a CPU with BRACE's trainers: SkyRL's loops, generator, batches, model wrappers and losses.

In one process: instead of Ray workers and vLLM servers there are two Llamas of a few thousand parameters and a sampler.
Needs SkyRL 0.3 and what its trainer imports, and Python 3.12. Of flash-attn, which needs CUDA, SkyRL's module of model
wrappers imports two functions that nothing here calls; while it is imported, others stand in their place.
"""

import asyncio
import copy
import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from zlib import crc32

import pytest
import torch

from brace_rl import core

pytest.importorskip("skyrl.train.trainer")

import skyrl_gym
from skyrl.backends.skyrl_train.distributed.dispatch import WorkerOutput
from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry, ppo_critic_loss
from skyrl.train.generators.skyrl_gym_generator import SkyRLGymGenerator
from skyrl.train.trainer import RayPPOTrainer
from skyrl.train.utils import validate_cfg
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel, PreTrainedTokenizerFast

from brace_rl.integrations.skyrl import launch, trainers

WORDS = ["<pad>", "<eos>", "<unk>", "system", "user", "assistant", *(f"w{n}" for n in range(16))]
PAD, EOS = 0, 1
STEPS = 3
PROMPTS_A_STEP = 2
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + ' ' + m['content'] + ' <eos> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant ' }}{% endif %}"
)
SETTINGS = {
    "trainer.policy.model.path": "policy",
    "trainer.critic.model.path": "critic",
    "trainer.algorithm.advantage_estimator": "gae",
    "trainer.algorithm.use_kl_loss": "false",
    "trainer.logger": "console",
    "trainer.train_batch_size": PROMPTS_A_STEP,
    "trainer.policy_mini_batch_size": PROMPTS_A_STEP,
    "trainer.critic_mini_batch_size": PROMPTS_A_STEP,
    "trainer.max_prompt_length": 64,
    "trainer.enable_ray_gpu_monitor": "false",
    "trainer.eval_interval": -1,
    "trainer.ckpt_interval": -1,
    "trainer.resume_mode": "none",
    "trainer.print_example_interval": 0,
    "trainer.placement.colocate_all": "false",
    "trainer.placement.policy_num_gpus_per_node": 1,
    "trainer.placement.critic_num_gpus_per_node": 1,
    "trainer.placement.ref_num_gpus_per_node": 1,
    "generator.inference_engine.enable_ray_prometheus_stats": "false",
    "generator.n_samples_per_prompt": 2,
    "generator.sampling_params.max_generate_length": 5,
    "generator.max_input_length": 64,
    "data.dataloader.num_workers": 0,
    "environment.env_class": "words",
}
MULTI_TURN = {"generator.max_turns": 2}
ASYNCHRONOUS = {
    "trainer.fully_async.enabled": "true",
    "trainer.fully_async.max_staleness_steps": 1,
    "trainer.fully_async.num_parallel_generation_workers": 2 * PROMPTS_A_STEP,
    "trainer.algorithm.policy_loss_type": "rollout_is",
}


def model_wrappers():
    """SkyRL's module of model wrappers, without flash-attn."""
    names = ("flash_attn", "flash_attn.bert_padding")
    missing = [name for name in names if name not in sys.modules]
    for name in missing:
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__spec__ = ModuleSpec(name, None)
    sys.modules[names[1]].pad_input = sys.modules[names[1]].unpad_input = None
    module = import_module("skyrl.backends.skyrl_train.workers.model_wrapper")
    for name in missing:
        del sys.modules[name]
    return module


class Words(skyrl_gym.envs.base_text_env.BaseTextEnv):
    """Answers every turn but the last with two words, and rewards long responses with different words in them."""

    def __init__(self, env_config, extras):
        super().__init__()
        self.max_turns = extras["max_turns"]

    def step(self, action):
        self.turns += 1
        done = self.turns >= self.max_turns
        said = action.split()
        answer = [] if done else [{"role": "user", "content": "w3 w4"}]
        return {"observations": answer, "reward": len(set(said)) / 4, "done": done, "metadata": {}}


class Prompts(list):
    """SkyRL's data set of prompts."""

    def __init__(self, count):
        super().__init__(
            {
                "prompt": [{"role": "user", "content": f"w{n} w5" if n % 2 else f"w{n} w1 w2"}],
                "env_class": None,
                "env_extras": {},
                "uid": str(n),
            }
            for n in range(count)
        )

    def collate_fn(self, items):
        return items


def tokenizer():
    words = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        chat_template=TEMPLATE,
        padding_side="left",
    )


class Engine:
    """In the place of vLLM: samples from a copy of the policy, and tells under which log-probs."""

    def __init__(self, model):
        self.model = copy.deepcopy(model)
        self.weight_version = 0

    async def generate(self, engine_input, model=None):
        (prompt,), (session,) = engine_input["prompt_token_ids"], engine_input["session_ids"]
        # Seeded by what is asked for, since SkyRL asks in no fixed order.
        generator = torch.Generator().manual_seed(crc32(f"{session}:{len(prompt)}:{self.weight_version}".encode()))
        sampled = await self._sample(prompt, engine_input["sampling_params"]["max_tokens"], generator)
        words, ids, reasons, logprobs = ([part] for part in sampled)
        return {
            "responses": words,
            "response_ids": ids,
            "stop_reasons": reasons,
            "response_logprobs": logprobs,
        }

    async def _sample(self, prompt, most, generator):
        ids, logprobs, reason = [], [], "length"
        while len(ids) < most:
            with torch.no_grad():
                logits = self.model(torch.tensor([prompt + ids])).logits[0, -1]
            scores = logits.log_softmax(-1)
            token = int(torch.multinomial(scores.exp(), 1, generator=generator))
            ids.append(token)
            logprobs.append(float(scores[token]))
            if token == EOS:
                reason = "stop"
                break
            # Others are sampled between two tokens, and weights change there.
            await asyncio.sleep(0)
        return " ".join(WORDS[token] for token in ids if token != EOS), ids, reason, logprobs

    async def finish_session(self, session_id): ...


class Workers:
    """In the place of Ray workers: SkyRL's model wrappers, losses and slices of a batch, on this process's CPU."""

    def __init__(self, config, engine_of, *, policy_lr=0.02):
        torch.manual_seed(0)
        llama = LlamaConfig(
            vocab_size=len(WORDS),
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            pad_token_id=PAD,
            eos_token_id=EOS,
        )
        model = LlamaForCausalLM(llama)
        self.algorithm = config.trainer.algorithm
        wrappers = model_wrappers()
        self.models = {
            "policy": wrappers.HFModelWrapper(model),
            "critic": wrappers._get_critic_model(LlamaModel.__base__, LlamaModel)(llama),
        }
        rates = {"policy": policy_lr, "critic": 0.01}
        self.optimizers = {name: torch.optim.SGD(m.parameters(), lr=rates[name]) for name, m in self.models.items()}
        self.engine = engine_of(model)
        self.trained = []

    def get_lcm_dp_size(self):
        return 1

    def empty_cache(self, model=None): ...

    def init_weight_sync_state(self, client): ...

    async def save_weights_for_sampler(self):
        self.engine.model.load_state_dict(self.models["policy"].model.state_dict())
        self.engine.weight_version += 1

    def stage_data(self, model, data, boundaries):
        return [data[start:end] for start, end in boundaries]

    def forward_from_staged(self, model, chunk):
        with torch.no_grad():
            rows = self._run(model, chunk)
        key = "values" if model == "critic" else "logprobs"
        return WorkerOutput(loss_fn_outputs=[{key: row.tolist()} for row in rows], metrics={})

    def forward_backward_from_staged(self, model, chunk):
        output = self._run(model, chunk)
        loss = self._critic_loss(output, chunk) if model == "critic" else self._policy_loss(output, chunk)
        loss.backward()
        self.trained.append((model, chunk))
        return WorkerOutput(loss_fn_outputs=[], metrics={"loss": loss.item()})

    def optim_step(self, model):
        norm = torch.nn.utils.clip_grad_norm_(self.models[model].parameters(), 1.0)
        self.optimizers[model].step()
        self.optimizers[model].zero_grad()
        return float(norm)

    def _run(self, model, chunk):
        return self.models[model](chunk["sequences"], chunk.metadata["response_length"], chunk["attention_mask"])

    def _critic_loss(self, values, chunk):
        return ppo_critic_loss(
            values, chunk["values"], chunk["returns"], config=self.algorithm, loss_mask=chunk["loss_mask"]
        )[0]

    def _policy_loss(self, logprobs, chunk):
        return PolicyLossRegistry.get(self.algorithm.policy_loss_type)(
            logprobs,
            chunk["action_log_probs"],
            chunk["advantages"],
            config=self.algorithm,
            loss_mask=chunk["loss_mask"],
            rollout_logprobs=chunk["rollout_logprobs"],
        )[0]


class Log:
    """SkyRL's tracker."""

    def __init__(self):
        self.steps = {}

    def log(self, figures, step, commit=False):
        self.steps.setdefault(step, {}).update(figures)

    def finish(self): ...


@pytest.fixture(autouse=True)
def environment():
    if "words" not in skyrl_gym.registry:
        skyrl_gym.register(id="words", entry_point=Words)


def run(tmp_path, changes, *, trainer_class=None):
    """Train; returns the tracker's steps, the batches before and after targets were computed, and the workers."""
    given = {**SETTINGS, **{f"trainer.{name}_path": str(tmp_path / name) for name in ("ckpt", "export", "log")}}
    config = launch.config_from_arguments([f"{key}={value}" for key, value in {**given, **changes}.items()])
    validate_cfg(config)
    workers = Workers(config, Engine)
    words = tokenizer()
    parts = {
        "cfg": config,
        "tracker": Log(),
        "tokenizer": words,
        "train_dataset": Prompts(STEPS * PROMPTS_A_STEP),
        "eval_dataset": None,
        "inference_engine_client": workers.engine,
        "generator": SkyRLGymGenerator(config.generator, config.environment.skyrl_gym, workers.engine, words),
        "colocate_pg": None,
    }
    trainer = (trainer_class or object.__new__(launch.BracePPOExp).get_trainer)(**parts)
    trainer.dispatch = workers
    batches, compute = [], trainer.compute_advantages_and_returns

    def recording(data):
        before = {name: x.clone() for name, x in data.items() if isinstance(x, torch.Tensor)}
        data = compute(data)
        batches.append(SimpleNamespace(**{**before, "returns": data["returns"], "advantages": data["advantages"]}))
        return data

    trainer.compute_advantages_and_returns = recording
    asyncio.run(trainer.train())
    assert len(batches) == STEPS
    return parts["tracker"].steps, batches, workers, trainer


def assert_targets_are_the_cores(batches, window):
    for batch in batches:
        wanted = core.brace_targets(
            values=batch.values,
            rewards=batch.rewards,
            behavior_logprobs=batch.rollout_logprobs,
            target_logprobs=batch.action_log_probs,
            policy_mask=batch.loss_mask.bool(),
            window=window,
        )
        torch.testing.assert_close(batch.returns, wanted.targets)


def test_in_a_synchronous_run_engine_and_policy_agree_and_targets_are_the_cores(tmp_path):
    steps, batches, _, trainer = run(tmp_path, {**MULTI_TURN, "trainer.algorithm.brace.window": 2})
    assert type(trainer) is trainers.BraceRayPPOTrainer
    assert_targets_are_the_cores(batches, 2)
    tool_tokens = sum(int((batch.response_mask.bool() & ~batch.loss_mask.bool()).sum()) for batch in batches)
    assert tool_tokens > 0
    for step in range(1, STEPS + 1):
        assert steps[step]["brace/ratio/log_abs_max"] < 1e-4


def test_in_a_fully_asynchronous_run_stale_responses_are_corrected(tmp_path):
    changes = {**MULTI_TURN, **ASYNCHRONOUS, "trainer.algorithm.brace.window": 2}
    steps, batches, workers, trainer = run(tmp_path, changes)
    assert type(trainer) is trainers.BraceFullyAsyncRayPPOTrainer
    assert_targets_are_the_cores(batches, 2)
    assert workers.engine.weight_version == STEPS + 1
    stale = [step for step in range(1, STEPS + 1) if steps[step]["async/staleness_max"] > 0]
    assert stale
    assert all(steps[step]["brace/ratio/log_abs_max"] > 1e-4 for step in stale)
    torch.testing.assert_close(steps[1]["brace/ratio/mean"], 1.0, rtol=1e-4, atol=1e-4)


def test_end_tokens_without_a_log_prob_make_no_false_ratios(tmp_path):
    changes = {"generator.use_conversation_multi_turn": "false", "trainer.algorithm.brace.window": 2}
    steps, batches, _, _ = run(tmp_path, changes)
    placeholders = [batch.loss_mask[:, -1].bool() & (batch.rollout_logprobs[:, -1] == 0) for batch in batches]
    assert sum(map(int, (placeholder.sum() for placeholder in placeholders))) > 0
    for step, (batch, placeholder) in enumerate(zip(batches, placeholders, strict=True), start=1):
        assert steps[step]["brace/logprobs/placeholders"] == placeholder.sum()
        assert (batch.action_log_probs[:, -1][placeholder] < -1).all()
        assert steps[step]["brace/ratio/log_abs_max"] < 1e-4


def test_a_run_with_window_zero_is_skyrls_own_gae_run_step_for_step(tmp_path):
    ours, our_batches, _, _ = run(tmp_path, {"trainer.algorithm.brace.window": 0})
    theirs, their_batches, _, _ = run(tmp_path, {}, trainer_class=RayPPOTrainer)
    for our, their in zip(our_batches, their_batches, strict=True):
        assert torch.equal(our.sequences, their.sequences)
        mask = our.loss_mask.bool()
        torch.testing.assert_close(our.returns[mask], their.returns[mask], rtol=1e-4, atol=1e-5)
    for step in range(1, STEPS + 1):
        for name in ("critic/loss", "critic/grad_norm", "policy/loss", "policy/grad_norm"):
            assert ours[step][name] == pytest.approx(theirs[step][name], rel=1e-3, abs=1e-6)


def test_values_are_those_before_the_token(tmp_path):
    _, batches, workers, _ = run(tmp_path, {**MULTI_TURN, "trainer.algorithm.brace.window": 2})
    model, (batch, width) = workers.models["critic"], (batches[-1], batches[-1].response_mask.shape[1])
    (chunk,) = [chunk for name, chunk in workers.trained[-2:] if name == "critic"]
    with torch.no_grad():
        now = model(chunk["sequences"], width, chunk["attention_mask"])
    for row in range(len(batch.sequences)):
        tokens = batch.sequences[row][batch.attention_mask[row].bool()]
        response = int(batch.response_mask[row].sum())
        for ahead in (response, 1):
            # The critic on what stands before the token; SkyRL's slice leaves out its last position.
            prefix = torch.cat([tokens[: len(tokens) - ahead], tokens[:1]])[None]
            with torch.no_grad():
                alone = model(prefix, 1, torch.ones_like(prefix))
            torch.testing.assert_close(now[row, width - ahead], alone[0, 0], rtol=1e-4, atol=1e-5)
