"""The plug-in waits for verl's modules, loads nothing, and patches what the older versions call."""

import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from brace_rl.errors import ConfigError
from brace_rl.integrations.verl.patch import keep_action_mask, patch_advantage
from brace_rl.integrations.when_imported import when_imported


def test_loading_the_plug_in_imports_neither_verl_nor_torch():
    heavy = ("verl", "torch", "ray", "transformers", "pydantic")
    code = f"import sys, brace_rl.integrations.verl.plugin; print([m for m in {heavy!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_action_follows_the_first_import_once(tmp_path, monkeypatch):
    (tmp_path / "brace_late_module.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    finders = list(sys.meta_path)
    seen = []
    when_imported("brace_late_module", lambda module: seen.append(module.value))
    assert seen == []
    import brace_late_module  # type: ignore[import-not-found]

    assert seen == [1]
    assert sys.meta_path == finders
    when_imported("brace_late_module", lambda module: seen.append(module.__name__))
    assert seen == [1, "brace_late_module"]
    assert brace_late_module.__spec__ is not None
    monkeypatch.delitem(sys.modules, "brace_late_module")


def test_a_module_that_is_not_there_stays_absent(monkeypatch):
    finders = list(sys.meta_path)
    when_imported("brace_no_such_module", lambda module: pytest.fail("there is no such module"))
    with pytest.raises(ModuleNotFoundError):
        import brace_no_such_module  # type: ignore[import-not-found]  # noqa: F401
    assert sys.meta_path == finders


def whiten(advantages, mask):
    """A stand-in for verl's: centred over the mask, junk elsewhere."""
    return advantages - (advantages * mask).sum() / mask.sum()


@pytest.fixture
def verl_functional(monkeypatch):
    module = ModuleType("verl.utils.torch_functional")
    module.masked_whiten = whiten
    for name in ("verl", "verl.utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "verl.utils.torch_functional", module)


def old_batch():
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])
    return SimpleNamespace(
        batch={
            "token_level_rewards": torch.tensor([[0.0, 0.0, 1.0, 0.0], [0.0, 0.5, 0.0, 0.0]]),
            "values": torch.full((2, 4), 0.25),
            "rollout_log_probs": torch.full((2, 4), -1.0),
            "old_log_probs": torch.full((2, 4), -0.9),
            "response_mask": mask,
        }
    )


def old_module():
    """A module of verl 0.8 as far as it is patched."""
    module = ModuleType("ray_trainer")

    def compute_advantage(data, adv_estimator, gamma=1.0, lam=1.0, num_repeat=1, config=None):
        data.batch["advantages"] = data.batch["returns"] = torch.full((2, 4), -7.0)
        return data

    module.compute_advantage = compute_advantage
    return module


def test_an_old_verl_without_the_node_runs_as_before(verl_functional):
    module = old_module()
    patch_advantage(module)
    data = module.compute_advantage(old_batch(), "gae", config={"gamma": 1.0})
    assert torch.equal(data.batch["returns"], torch.full((2, 4), -7.0))


def test_an_old_verl_with_the_node_gets_our_targets(verl_functional):
    module = old_module()
    patch_advantage(module)
    patch_advantage(module)
    data = module.compute_advantage(old_batch(), "gae", gamma=1.0, config={"brace": {"window": 0}})
    assert torch.equal(data.batch["returns"], torch.tensor([[1.0, 1.0, 1.0, 0.0], [0.5, 0.5, 0.0, 0.0]]))
    # Targets less the value: .75 thrice and .25 twice, whose mean is .55.
    torch.testing.assert_close(data.batch["advantages"], torch.tensor([[0.2, 0.2, 0.2, 0.0], [-0.3, -0.3, 0.0, 0.0]]))


def test_an_old_verl_with_another_estimator_is_refused(verl_functional):
    module = old_module()
    patch_advantage(module)
    with pytest.raises(ConfigError, match="adv_estimator = grpo"):
        module.compute_advantage(old_batch(), "grpo", config={"brace": {"window": 0}})


def test_rejection_in_an_old_verl_changes_no_target(verl_functional):
    helper = ModuleType("rollout_corr_helper")

    def reject_all_but_first(batch, config):
        batch.batch["response_mask"] = torch.tensor([[1, 0, 0, 0], [1, 0, 0, 0]])
        return batch, {"rejected": 3}

    helper.compute_rollout_correction_and_add_to_batch = reject_all_but_first
    keep_action_mask(helper)
    module = old_module()
    patch_advantage(module)
    kept = module.compute_advantage(old_batch(), "gae", config={"brace": {"window": 2}})
    data, metrics = helper.compute_rollout_correction_and_add_to_batch(old_batch(), {})
    assert metrics == {"rejected": 3}
    rejected = module.compute_advantage(data, "gae", config={"brace": {"window": 2}})
    assert torch.equal(rejected.batch["returns"], kept.batch["returns"])
    assert rejected.batch["returns"].any()
