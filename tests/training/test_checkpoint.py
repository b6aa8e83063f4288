import ast
import errno
import json
import math
import os
from pathlib import Path

import pytest
import torch
from fakes import fake_request
from transformers import AutoModelForCausalLM, AutoTokenizer

import brace_rl
from brace_rl.config import ModelConfig
from brace_rl.errors import BraceError
from brace_rl.tasks.tokenizer import build_calculator_tokenizer
from brace_rl.training import checkpoint as module
from brace_rl.training.checkpoint import checkpoint_step, latest_checkpoint, load_checkpoint, save_checkpoint
from brace_rl.training.models import Critic, new_actor
from brace_rl.training.types import RolloutGroup, Trajectory

TOKENIZER = build_calculator_tokenizer()
TINY = ModelConfig(device="cpu", hidden_size=16, layers=1, heads=2, intermediate_size=24)


class Training:
    """Both models under AdamW, on batches drawn from the global random state."""

    def __init__(self, seed=0, config=TINY, dtype=torch.float32):
        self.actor = new_actor(config, TOKENIZER, seed).to(dtype)
        self.critic = Critic.from_actor(self.actor)
        self.optimizers = {
            "actor": torch.optim.AdamW(self.actor.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.01),
            "critic": torch.optim.AdamW(self.critic.parameters(), lr=1e-2),
        }

    def step(self, *, actor=True):
        ids = torch.randint(4, len(TOKENIZER), (2, 6))
        mask = torch.ones_like(ids)
        critic_loss = (self.critic(ids, mask) - torch.randn(2, 6)).pow(2).mean()
        critic_loss.backward()
        self.optimizers["critic"].step()
        self.optimizers["critic"].zero_grad()
        if not actor:
            return [critic_loss.item()]
        actor_loss = self.actor(ids, attention_mask=mask).logits.float().logsumexp(-1).mean()
        actor_loss.backward()
        self.optimizers["actor"].param_groups[0]["lr"] *= 0.9
        self.optimizers["actor"].step()
        self.optimizers["actor"].zero_grad()
        return [critic_loss.item(), actor_loss.item()]

    def save(self, directory, step=1, **changes):
        arguments = {"tensors": {}, "state": {}, "groups": [], "keep": 2, **changes}
        return save_checkpoint(
            directory,
            step=step,
            actor=self.actor,
            tokenizer=TOKENIZER,
            critic=self.critic,
            optimizers=self.optimizers,
            **arguments,
        )

    def load(self, path):
        return load_checkpoint(path, actor=self.actor, critic=self.critic, optimizers=self.optimizers)

    def tensors(self):
        return [*self.actor.state_dict().values(), *self.critic.state_dict().values()]


def names(folder):
    return sorted(child.name for child in folder.iterdir())


def a_group(index=0):
    trajectory = Trajectory(
        index, 0, f"p{index}", [4], [5, 6], [True, False], [-1 / 3, 0.0], [0.1, 0.0], [2, -1], [1, 0]
    )
    return RolloutGroup(fake_request(index), [trajectory])


def refused(call, *, match):
    with pytest.raises(BraceError, match=match) as caught:
        call()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_resumed_training_goes_on_bit_for_bit(tmp_path, dtype):
    torch.manual_seed(0)
    unbroken = Training(dtype=dtype)
    for _ in range(3):
        unbroken.step()
    path = unbroken.save(tmp_path, step=3)
    losses = [unbroken.step() for _ in range(3)]

    torch.manual_seed(99)
    resumed = Training(seed=5, dtype=dtype)
    resumed.step()
    resumed.load(path)
    assert [resumed.step() for _ in range(3)] == losses
    assert all(torch.equal(a, b) for a, b in zip(resumed.tensors(), unbroken.tensors(), strict=True))
    assert {p.dtype for p in resumed.actor.parameters()} == {dtype}


def test_an_optimizer_that_has_not_stepped_resumes_as_one(tmp_path):
    torch.manual_seed(0)
    unbroken = Training()
    unbroken.step(actor=False)
    path = unbroken.save(tmp_path)
    losses = [unbroken.step(), unbroken.step()]
    resumed = Training(seed=5)
    resumed.step()
    resumed.load(path)
    assert not resumed.optimizers["actor"].state
    assert [resumed.step(), resumed.step()] == losses


def test_saving_draws_nothing_and_changes_nothing(tmp_path):
    training = Training()
    training.step()
    state, tensors = torch.get_rng_state(), [t.clone() for t in training.tensors()]
    training.save(tmp_path)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(training.tensors(), tensors, strict=True))


def test_the_optimizer_state_comes_back_exactly(tmp_path):
    training = Training()
    training.step()
    saved = training.optimizers["actor"].state_dict()
    other = Training(seed=1)
    other.load(training.save(tmp_path))
    loaded = other.optimizers["actor"].state_dict()
    assert loaded["param_groups"] == saved["param_groups"]
    assert loaded["param_groups"][0]["betas"] == (0.9, 0.95)
    assert loaded["state"].keys() == saved["state"].keys()
    for index, entries in saved["state"].items():
        assert entries.keys() == {"step", "exp_avg", "exp_avg_sq"}
        for key, value in entries.items():
            assert loaded["state"][index][key].dtype == value.dtype
            assert torch.equal(loaded["state"][index][key], value)


def test_the_rest_comes_back_as_it_was(tmp_path):
    whole = torch.arange(6.0)
    tensors = {
        "a.b/c": whole,
        "view": whole[1:3],
        "half": torch.ones(2, dtype=torch.bfloat16),
        "scalar": torch.tensor(3),
    }
    state = {"version": 7, "nested": {"x": [1, 2.5, None, "é"]}}
    groups = [a_group(4), a_group(9)]
    training = Training()
    path = training.save(tmp_path, step=7, tensors=tensors, state=state, groups=groups)
    loaded = training.load(path)
    assert loaded.step == 7
    assert loaded.state == state
    assert loaded.groups == groups
    assert loaded.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded.tensors[name].dtype == tensor.dtype
        assert torch.equal(loaded.tensors[name], tensor)


def test_the_actor_is_an_ordinary_transformers_folder(tmp_path):
    training = Training()
    training.step()
    path = training.save(tmp_path)
    ids = torch.tensor([[5, 6, 7]])
    loaded = AutoModelForCausalLM.from_pretrained(path / "actor")
    assert torch.equal(loaded(ids).logits, training.actor(ids).logits)
    assert AutoTokenizer.from_pretrained(path / "actor").get_vocab() == TOKENIZER.get_vocab()


def test_a_checkpoint_holds_nothing_but_json_and_safetensors(tmp_path):
    training = Training()
    training.step()
    path = training.save(tmp_path, groups=[a_group()])
    suffixes = {file.suffix for file in path.rglob("*") if file.is_file()}
    assert suffixes <= {".json", ".jsonl", ".safetensors", ".jinja"}


def test_no_module_of_the_package_unpickles_a_file():
    """``pickle.loads`` of a message between processes of one run is allowed, in the backends alone."""
    package = Path(brace_rl.__file__).parent
    forbidden = {
        "torch.load",
        "pickle.load",
        "pickle.Unpickler",
        "numpy.load",
        "np.load",
        "dill",
        "cloudpickle",
        "joblib",
    }
    for file in package.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute):
                assert ast.unparse(node) not in forbidden, file
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not forbidden & set(names), file
            assert "pickle" not in names or file.parent == package / "training" / "backends", file


def test_old_checkpoints_are_pruned_by_step_and_the_new_one_never(tmp_path):
    training = Training()
    for step in (9, 10, 999_999, 1_000_000):
        training.save(tmp_path, step=step)
    assert names(tmp_path / "checkpoints") == ["step_1000000", "step_999999"]
    path = training.save(tmp_path, step=3, keep=1)
    assert names(tmp_path / "checkpoints") == ["step_000003"]
    assert latest_checkpoint(tmp_path) == path


def test_the_latest_checkpoint_is_that_of_most_steps(tmp_path):
    assert latest_checkpoint(tmp_path) is None
    training = Training()
    training.save(tmp_path, step=999_999)
    path = training.save(tmp_path, step=1_000_000)
    (tmp_path / "checkpoints" / "step_2000000").mkdir()
    (tmp_path / "checkpoints" / "notes").mkdir()
    assert latest_checkpoint(tmp_path) == path
    assert checkpoint_step(path) == 1_000_000
    refused(lambda: checkpoint_step(tmp_path), match="is no checkpoint")


def test_saving_the_same_step_again_replaces_it(tmp_path):
    training = Training()
    training.save(tmp_path, state={"try": 1})
    path = training.save(tmp_path, state={"try": 2})
    assert training.load(path).state == {"try": 2}
    assert names(tmp_path / "checkpoints") == ["step_000001"]


@pytest.mark.parametrize("stage", ["write_actor", "_save_tensors", "_save_optimizers", "random_state"])
def test_a_full_disk_leaves_the_previous_checkpoint_alone(tmp_path, monkeypatch, stage):
    training = Training()
    path = training.save(tmp_path, step=1, keep=1)

    def disk_full(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(module, stage, disk_full)
    refused(lambda: training.save(tmp_path, step=2, keep=1), match="step_000002: no space left on the disk")
    monkeypatch.undo()
    assert names(tmp_path / "checkpoints") == ["step_000001"]
    assert latest_checkpoint(tmp_path) == path
    training.load(path)


def test_a_process_killed_while_saving_leaves_the_previous_checkpoint(tmp_path, monkeypatch):
    training = Training()
    training.step()
    path = training.save(tmp_path, step=1)

    def killed():
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "random_state", killed)
    monkeypatch.setattr("shutil.rmtree", lambda *args, **kwargs: None)  # a killed process does not clean up
    with pytest.raises(KeyboardInterrupt):
        training.save(tmp_path, step=2)
    monkeypatch.undo()
    assert len(names(tmp_path / "checkpoints")) == 2  # the half-written one is hidden
    assert latest_checkpoint(tmp_path) == path
    Training(seed=3).load(path)
    training.save(tmp_path, step=2)
    assert names(tmp_path / "checkpoints") == ["step_000001", "step_000002"]


FILES = [
    "critic.safetensors",
    "optimizer.safetensors",
    "tensors.safetensors",
    "optimizer.json",
    "random.json",
    "state.json",
    "buffer.jsonl",
    "actor/model.safetensors",
]


@pytest.mark.parametrize("name", FILES)
def test_a_truncated_file_is_refused_by_name(tmp_path, name):
    training = Training()
    training.step()
    path = training.save(tmp_path, groups=[a_group()])
    content = (path / name).read_bytes()
    (path / name).write_bytes(content[: len(content) // 2])
    refused(lambda: training.load(path), match=f"{name.split('/')[0]}.*(damaged|cannot be loaded)")


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_refused_by_name(tmp_path, name):
    training = Training()
    path = training.save(tmp_path, groups=[a_group()])
    (path / name).unlink()
    refused(lambda: training.load(path), match=name.split("/")[0])


def test_lines_missing_from_the_buffer_are_noticed(tmp_path):
    training = Training()
    path = training.save(tmp_path, groups=[a_group(0), a_group(1)])
    lines = (path / "buffer.jsonl").read_text().splitlines(keepends=True)
    (path / "buffer.jsonl").write_text(lines[0])
    refused(lambda: training.load(path), match="holds 1 prompts instead of 2")
    (path / "buffer.jsonl").write_text(lines[0] + '{"request": 1}\n')
    refused(lambda: training.load(path), match=r"buffer\.jsonl, line 2")


def test_another_format_is_refused(tmp_path):
    training = Training()
    path = training.save(tmp_path)
    data = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps({**data, "format": module.FORMAT + 1}))
    refused(lambda: training.load(path), match=f"format {module.FORMAT + 1}, this version reads {module.FORMAT}")


@pytest.mark.parametrize(("change", "what"), [({"hidden_size": 32}, "is"), ({"layers": 2}, "only one of")])
def test_another_model_is_refused(tmp_path, change, what):
    path = Training().save(tmp_path)
    other = Training(config=TINY.model_copy(update=change))
    refused(lambda: other.load(path), match=f"another model: .*{what}")


def test_another_dtype_of_the_critic_is_refused(tmp_path):
    path = Training().save(tmp_path)
    refused(lambda: Training(dtype=torch.bfloat16).load(path), match="float32 there and .* bfloat16 in this run")


def test_other_optimizers_are_refused(tmp_path):
    training = Training()
    path = training.save(tmp_path)
    both = training.optimizers
    training.optimizers = {"actor": both["actor"]}
    refused(lambda: training.load(path), match=r"\['actor', 'critic'\], this run has \['actor'\]")
    training.optimizers = {"actor": both["critic"], "critic": both["actor"]}
    refused(lambda: training.load(path), match="actor optimiser is of a model of another shape")


def test_the_state_says_which_libraries_wrote_it(tmp_path):
    path = Training().save(tmp_path, step=12, state={"x": math.pi})
    data = json.loads((path / "state.json").read_text())
    assert data["libraries"]["torch"] == torch.__version__
    assert data["libraries"]["brace_rl"] == brace_rl.__version__
    assert (data["step"], data["state"]) == (12, {"x": math.pi})
