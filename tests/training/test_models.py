import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from brace_rl.config import ModelConfig
from brace_rl.errors import BraceError, ModelError
from brace_rl.tasks.tokenizer import build_calculator_tokenizer
from brace_rl.training import models
from brace_rl.training.models import (
    Critic,
    count_parameters,
    load_actor,
    load_tokenizer,
    new_actor,
    resolve_device,
    save_actor,
)

CPU = torch.device("cpu")
TINY = ModelConfig(device="cpu", hidden_size=16, layers=2, heads=2, intermediate_size=24)
SIZES = {"vocab_size": 30, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
IDS = torch.tensor([[5, 6, 7, 8, 9], [9, 8, 7, 0, 0]])
MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])


def family(name):
    """A randomly initialised model whose dropout, if it has any, is off."""
    torch.manual_seed(0)
    ends = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}
    if name == "llama":
        return LlamaForCausalLM(LlamaConfig(**SIZES, **ends)).eval()
    if name == "qwen2":
        return Qwen2ForCausalLM(Qwen2Config(**SIZES, **ends, num_key_value_heads=1)).eval()
    return GPT2LMHeadModel(GPT2Config(vocab_size=30, n_embd=16, n_layer=2, n_head=2, **ends)).eval()


@pytest.fixture
def tokenizer():
    return build_calculator_tokenizer()


@pytest.fixture
def folder(tmp_path, tokenizer):
    save_actor(new_actor(TINY, tokenizer, seed=0), tokenizer, tmp_path / "model")
    return tmp_path / "model"


def edit_json(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def refused(call, *, match):
    with pytest.raises(ModelError, match=match) as caught:
        call()
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def load(path):
    return load_actor(path, dtype="float32", device=CPU)


def test_auto_is_a_gpu_exactly_when_there_is_one():
    assert resolve_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert resolve_device("cpu") == CPU


@pytest.mark.parametrize("name", ["gpu", "tpu:0", "mps", "meta", ""])
def test_a_device_that_cannot_be_used_is_refused(name):
    refused(lambda: resolve_device(name), match=r"model\.device")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu_is_refused():
    refused(lambda: resolve_device("cuda"), match="sees none; use cpu")


def test_a_new_actor_has_the_configured_shape(tokenizer):
    actor = new_actor(TINY, tokenizer, seed=0)
    config = actor.config
    assert (config.vocab_size, config.hidden_size, config.num_hidden_layers) == (len(tokenizer), 16, 2)
    assert (config.num_attention_heads, config.intermediate_size) == (2, 24)
    assert (config.pad_token_id, config.eos_token_id) == (tokenizer.pad_token_id, tokenizer.eos_token_id)
    assert actor.get_input_embeddings().weight is actor.get_output_embeddings().weight
    attention, mlp, norms = 4 * 16 * 16, 3 * 16 * 24, 2 * 16
    assert count_parameters(actor) == len(tokenizer) * 16 + 2 * (attention + mlp + norms) + 16
    assert {p.dtype for p in actor.parameters()} == {torch.float32}
    assert not actor.training


def test_a_new_actor_depends_on_its_seed_and_on_no_random_state(tokenizer):
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = new_actor(TINY, tokenizer, seed=3).state_dict()
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    same, other = (new_actor(TINY, tokenizer, seed=seed).state_dict() for seed in (3, 4))
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


def test_a_new_actor_keeps_float32_weights_when_forward_passes_are_bfloat16(tokenizer):
    actor = new_actor(TINY.model_copy(update={"dtype": "bfloat16"}), tokenizer, seed=0)
    assert actor.dtype == torch.float32


@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2"])
def test_a_saved_actor_is_an_ordinary_transformers_folder(tmp_path, tokenizer, name):
    actor = family(name)
    save_actor(actor, tokenizer, tmp_path / "m")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "m").eval()
    assert torch.equal(loaded(IDS, attention_mask=MASK).logits, actor(IDS, attention_mask=MASK).logits)
    assert AutoTokenizer.from_pretrained(tmp_path / "m").get_vocab() == tokenizer.get_vocab()
    assert [child.name for child in tmp_path.iterdir()] == ["m"]


def test_loading_converts_to_the_asked_dtype_and_back_without_loss(folder, tmp_path, tokenizer):
    half = load_actor(folder, dtype="bfloat16", device=CPU)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    save_actor(half, tokenizer, tmp_path / "half")
    again = load_actor(str(tmp_path / "half"), dtype="bfloat16", device=CPU)
    assert all(torch.equal(a, b) for a, b in zip(half.parameters(), again.parameters(), strict=True))


def test_a_loaded_model_has_its_dropout_off(tmp_path, tokenizer):
    save_actor(family("gpt2").train(), tokenizer, tmp_path / "m")
    actor = load(tmp_path / "m")
    assert not actor.training
    assert torch.equal(actor(IDS).logits, actor(IDS).logits)


def test_saving_replaces_a_folder_and_a_full_disk_does_not(folder, tokenizer, monkeypatch):
    before = (folder / "model.safetensors").read_bytes()

    def disk_full(*args, **kwargs):
        raise RuntimeError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(tokenizer, "save_pretrained", disk_full)
    with pytest.raises(BraceError, match="model: no space left on the disk"):
        save_actor(new_actor(TINY, tokenizer, seed=1), tokenizer, folder)
    assert (folder / "model.safetensors").read_bytes() == before
    assert [child.name for child in folder.parent.iterdir()] == ["model"]


def test_nothing_is_printed(folder, capfd):
    load(folder)
    load_tokenizer(folder)
    assert capfd.readouterr() == ("", "")


def test_a_missing_folder_is_refused(tmp_path):
    refused(lambda: load(tmp_path / "nowhere"), match="nowhere: no such model folder")
    refused(lambda: load_tokenizer("./nowhere"), match="nowhere: no such model folder")


def test_a_file_is_refused(folder):
    refused(lambda: load(folder / "config.json"), match="is a file")


def test_a_hub_name_without_a_network_is_refused_at_once(monkeypatch, tmp_path):
    constants = pytest.importorskip("huggingface_hub").constants
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    refused(lambda: load("someone/some-model"), match="someone/some-model: .*cannot be reached")


def test_a_hub_name_in_the_local_cache_needs_no_network(monkeypatch, tmp_path, folder):
    constants = pytest.importorskip("huggingface_hub").constants
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    repository = tmp_path / "cache" / "models--someone--some-model"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    shutil.copytree(folder, repository / "snapshots" / ("0" * 40))
    assert count_parameters(load("someone/some-model")) == count_parameters(load(folder))
    assert load_tokenizer("someone/some-model").eos_token == "<eos>"


def test_a_folder_without_a_readable_config_is_refused(folder):
    config = folder / "config.json"
    config.write_text("{")
    refused(lambda: load(folder), match=r"config\.json: cannot be read")
    config.write_text("[]")
    refused(lambda: load(folder), match="must hold a JSON object")
    config.unlink()
    refused(lambda: load(folder), match=r"has no config\.json")
    (folder / "adapter_config.json").write_text("{}")
    refused(lambda: load(folder), match="merge it into its base model")


def test_an_unknown_architecture_is_refused(folder):
    edit_json(folder / "config.json", model_type="nonesuch")
    refused(lambda: load(folder), match="model_type 'nonesuch'")


def test_a_model_with_code_of_its_own_is_refused_and_its_code_not_run(folder):
    (folder / "evil.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\nclass M: pass\n")
    auto_map = {"AutoConfig": "evil.M", "AutoModelForCausalLM": "evil.M"}
    edit_json(folder / "config.json", model_type="nonesuch", auto_map=auto_map)
    refused(lambda: load(folder), match="needs Python code from its folder")
    edit_json(folder / "config.json", model_type="bert", auto_map=auto_map)
    refused(lambda: load(folder), match="holds no weights")
    assert not (folder / "ran").exists()


def test_a_tokenizer_with_code_of_its_own_is_refused(folder):
    edit_json(folder / "tokenizer_config.json", tokenizer_class="Evil", auto_map={"AutoTokenizer": ["evil.M", None]})
    refused(lambda: load_tokenizer(folder), match="needs Python code from its folder")


def test_pickled_weights_are_refused(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refused(lambda: load(folder), match="only pickled weights")
    (folder / "pytorch_model.bin").unlink()
    refused(lambda: load(folder), match="has no weights")


@pytest.mark.parametrize("kept", [0, 4, -100])
def test_truncated_weights_are_refused(folder, kept):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    refused(lambda: load(folder), match="model: cannot be loaded: .*deserializing header")


def test_weights_that_are_missing_are_not_drawn_at_random(folder):
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    refused(lambda: load(folder), match=r"holds no weights for model\.norm\.weight")


def test_weights_of_another_size_are_refused(folder):
    edit_json(folder / "config.json", intermediate_size=32)
    refused(lambda: load(folder), match=r"of another size than the weights \(model\.layers\.0\.mlp\.down_proj\.weight")


def test_a_folder_without_a_tokenizer_is_refused(folder):
    (folder / "tokenizer.json").write_text("{")
    refused(lambda: load_tokenizer(folder), match="model: cannot be loaded")
    (folder / "tokenizer.json").unlink()
    refused(lambda: load_tokenizer(folder), match="has no tokenizer")


def test_a_tokenizer_without_an_end_of_sequence_token_is_refused(folder):
    edit_json(folder / "tokenizer_config.json", eos_token=None)
    refused(lambda: load_tokenizer(folder), match="names no eos_token")


def test_a_tokenizer_without_a_padding_token_pads_with_the_end_of_sequence(folder):
    edit_json(folder / "tokenizer_config.json", pad_token=None)
    tokenizer = load_tokenizer(folder)
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids("<eos>")


@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2"])
def test_a_critic_starts_at_zero_with_the_actors_backbone(name):
    actor = family(name)
    critic = Critic.from_actor(actor)
    values = critic(IDS, MASK)
    assert values.shape == (2, 5)
    assert values.dtype == torch.float32
    assert torch.equal(values, torch.zeros(2, 5))
    mine, theirs = critic.backbone.state_dict(), actor.base_model.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[key], theirs[key]) for key in mine)
    assert not {p.data_ptr() for p in critic.parameters()} & {p.data_ptr() for p in actor.parameters()}
    assert all(p.requires_grad and p.grad is None for p in critic.parameters())


@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2"])
def test_the_value_in_column_i_sees_tokens_up_to_i_and_no_padding(name):
    critic = Critic.from_actor(family(name))
    torch.nn.init.normal_(critic.head.weight)
    values = critic(IDS, MASK)
    changed = IDS.clone()
    changed[0, 3], changed[1, 3:] = 11, 12
    after = critic(changed, MASK)
    torch.testing.assert_close(after[0, :3], values[0, :3])
    torch.testing.assert_close(after[1, :3], values[1, :3])
    assert (after[0, 3:] - values[0, 3:]).abs().min() > 1e-4
    torch.testing.assert_close(critic(IDS[1:, :3], MASK[1:, :3])[0], values[1, :3])


def test_a_critic_does_not_copy_the_actors_gradients():
    actor = family("llama")
    actor(IDS).logits.sum().backward()
    assert all(p.grad is None for p in Critic.from_actor(actor).parameters())
    assert actor.model.norm.weight.grad is not None


def test_making_a_critic_draws_nothing():
    actor = family("llama")
    state = torch.get_rng_state()
    first, second = Critic.from_actor(actor), Critic.from_actor(actor)
    assert torch.equal(first.head.weight, second.head.weight)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_value_head_stays_in_float32_under_a_bfloat16_backbone_and_under_autocast():
    critic = Critic.from_actor(family("llama").to(torch.bfloat16))
    torch.nn.init.constant_(critic.head.bias, 1 + 2**-12)  # not a bfloat16 number
    assert critic.head.weight.dtype == torch.float32
    assert critic(IDS, MASK)[0, 0].item() == 1 + 2**-12
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert critic(IDS, MASK)[0, 0].item() == 1 + 2**-12


def test_quiet_transformers_restores_what_it_found():
    import transformers

    before = transformers.logging.get_verbosity(), transformers.logging.is_progress_bar_enabled()
    with models.quiet_transformers():
        assert not transformers.logging.is_progress_bar_enabled()
    assert (transformers.logging.get_verbosity(), transformers.logging.is_progress_bar_enabled()) == before
