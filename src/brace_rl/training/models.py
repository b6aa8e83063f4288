"""The actor and the critic: making, loading and saving them.

Weights are safetensors, nothing is unpickled, and no code from a model folder runs.
"""

from __future__ import annotations

import copy
import json
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from brace_rl.errors import ModelError
from brace_rl.files import atomic_directory, is_disk_full

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from brace_rl.config import ModelConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""Parameter dtypes by their name in the configuration."""

MAX_POSITIONS = 4096
"""Longest sequence, prompt and response together, of a model started from random weights."""

_ATTENTION = re.compile(r"\b(self_attn|attention|attn)\b")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
# A model's own files sit at the top of its repository; `consolidated` repeats the weights in another layout.
_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.tiktoken", "*.txt", "*.jinja"]
_HUB_FILES_NOT_NEEDED = ["*/*", "consolidated*"]
_TOKENIZER_FILES = ("tokenizer.json", "*.model", "vocab.*", "*.tiktoken", "tekken.json")

_NEEDS_CODE = "needs Python code from its folder, which is never run; use a model transformers knows by itself"

_LONGEST_REASON = 200
"""Characters of a library's error message that are passed on."""


def resolve_device(name: str) -> torch.device:
    """The device called ``name``: "auto" (a GPU if there is one, else the CPU), "cpu", "cuda" or "cuda:N".

    Raises:
        ModelError: no such device here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ModelError(f"model.device: no device is called '{name}'; use auto, cpu, cuda or cuda:N") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ModelError(f"model.device: '{name}' asks for a GPU, but torch {torch.__version__} sees none; use cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ModelError(
            f"model.device: no '{name}' here; torch sees {torch.cuda.device_count()} GPU(s), from cuda:0 on"
        )
    if device.type not in ("cpu", "cuda"):
        raise ModelError(f"model.device: '{name}' is not supported; use auto, cpu, cuda or cuda:N")
    return device


def new_actor(config: ModelConfig, tokenizer: PreTrainedTokenizerBase, seed: int) -> PreTrainedModel:
    """A Llama of the configured size with random float32 weights that depend on ``seed`` alone, in eval mode.

    Input and output embeddings are tied. It is on the configured device; the configured dtype is that of forward
    passes and does not enter. The global random states are as they were before the call.
    """
    llama = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=config.hidden_size,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.heads,
        intermediate_size=config.intermediate_size,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        attn_implementation="sdpa",
    )
    with torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed, which would reseed every GPU too.
        torch.default_generator.manual_seed(seed)
        model = LlamaForCausalLM(llama).float()
    return model.to(resolve_device(config.device)).eval()


def check_model(path: str | Path) -> None:
    """Look for a model without loading it: folder, configuration, weights in a form that is accepted.

    Raises:
        ModelError: as :func:`load_actor`, as far as this can tell.
    """
    _check_weights_present(_local_folder(path))


def load_actor(path: str | Path, *, dtype: str, device: torch.device) -> PreTrainedModel:
    """The causal language model in a folder, or of a hub name, in eval mode (dropout off).

    A hub name is looked up in the local cache and, when that lacks it and there is a network, downloaded.

    Raises:
        ModelError: one line; no such folder or name, no configuration, weights absent, only pickled, truncated or not
            those of the configuration, or a model that needs code of its own.
    """
    return read_actor(_local_folder(path), DTYPES[dtype]).to(device)


def read_actor(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """The causal language model in ``folder`` on the CPU, in eval mode.

    Raises:
        ModelError: as :func:`load_actor`.
    """
    _check_weights_present(folder)
    model, report = load_library(
        folder,
        lambda: AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        ),
    )
    # transformers would draw what is missing, and with ignore_mismatched_sizes what does not fit, at random. Asking
    # for the report instead of its error gives the names.
    if report["mismatched_keys"]:
        names = [str(key[0]) for key in report["mismatched_keys"]]
        raise ModelError(f"{folder}: config.json is of another size than the weights ({_some(names)})")
    if report["missing_keys"]:
        raise ModelError(f"{folder}: holds no weights for {_some(report['missing_keys'])}; is it a whole causal LM?")
    return model.eval()


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer in a model folder, or of a hub name. One without a padding token pads with end of sequence.

    Raises:
        ModelError: one line; no such folder or name, no tokenizer in it, or one without an end-of-sequence token.
    """
    folder = _local_folder(path)
    if not any(any(folder.glob(pattern)) for pattern in _TOKENIZER_FILES):
        raise ModelError(f"{folder}: has no tokenizer (tokenizer.json); save one beside the model")
    tokenizer = load_library(folder, lambda: AutoTokenizer.from_pretrained(folder, trust_remote_code=False))
    if tokenizer.eos_token_id is None:
        raise ModelError(f"{folder}: its tokenizer names no eos_token, so no response could end; set one and save it")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def save_actor(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, path: str | Path) -> None:
    """Write an ordinary ``transformers`` folder (safetensors) to ``path``, replacing what was there in one step.

    Raises:
        BraceError: the path cannot be written, a full disk included; nothing half-written is left.
    """
    with atomic_directory(path) as folder:
        write_actor(model, tokenizer, folder)


def write_actor(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """As :func:`save_actor`, into a folder whose atomic appearance is the caller's business."""
    with quiet_transformers():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def count_parameters(module: nn.Module) -> int:
    """Number of parameters; tied ones count once."""
    return sum(parameter.numel() for parameter in module.parameters())


class Critic(nn.Module):
    """Value function: a transformer backbone with a linear head on every position.

    The head is in float32 whatever the backbone's dtype, also under autocast, and zero at the start, so that the first
    values are 0.
    """

    def __init__(self, backbone: nn.Module, hidden_size: int) -> None:
        super().__init__()
        self.backbone = backbone
        # By way of "meta" no random number is drawn for weights that are then zeroed.
        self.head = nn.Linear(hidden_size, 1, dtype=torch.float32, device="meta").to_empty(device="cpu")
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    @classmethod
    def from_actor(cls, actor: PreTrainedModel) -> Critic:
        """A critic whose backbone is a copy of the actor's, on its device, in its dtype and mode; nothing is shared."""
        backbone = copy.deepcopy(actor.base_model).requires_grad_(True)
        backbone.zero_grad(set_to_none=True)
        critic = cls(backbone, actor.config.get_text_config().hidden_size)
        return critic.to(actor.device).train(actor.training)

    def freeze_attention(self) -> None:
        """Take the backbone's attention layers out of training (SAO, arXiv 2607.07508).

        Raises:
            ModelError: no module of the backbone is named like one.
        """
        frozen = [x for name, x in self.backbone.named_parameters() if _ATTENTION.search(name)]
        if not frozen:
            raise ModelError(
                f"{type(self.backbone).__name__}: no parameter is named like an attention layer's; set "
                "optim.freeze_critic_attention to false"
            )
        for parameter in frozen:
            parameter.requires_grad_(False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Values of the states a sequence passes through.

        Args:
            input_ids: ``[B, L]``, padded on the right.
            attention_mask: ``[B, L]``, 1 at tokens and 0 at padding.

        Returns:
            ``[B, L]`` float32. Column ``i`` is the value of the state *after* token ``i``, which is the state *before*
            token ``i + 1``: the learner reads column ``i`` as ``V(s)`` of the decision for token ``i + 1``. Columns at
            padding mean nothing.
        """
        hidden = self.backbone(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).last_hidden_state
        with torch.autocast(hidden.device.type, enabled=False):
            values: Tensor = self.head(hidden.to(self.head.weight.dtype)).squeeze(-1)
        return values.clone()  # FSDP2 hooks on to what is returned, and a hook on a view can get lost


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep ``transformers``' progress bars and reports off the screen inside the block; errors still raise."""
    level, bars = transformers.logging.get_verbosity(), transformers.logging.is_progress_bar_enabled()
    transformers.logging.set_verbosity(logging.CRITICAL)
    transformers.logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(level)
        if bars:
            transformers.logging.enable_progress_bar()


def load_library(source: Path, load: Callable[[], Any]) -> Any:
    """Call ``load``, which reads ``source`` through ``transformers``, quietly.

    Raises:
        ModelError: whatever goes wrong inside, as one line that names ``source``.
    """
    try:
        with quiet_transformers():
            return load()
    except Exception as error:
        if is_disk_full(error) or isinstance(error, MemoryError):
            raise
        reason = _NEEDS_CODE if "trust_remote_code" in str(error) else f"cannot be loaded: {_one_line(error)}"
        raise ModelError(f"{source}: {reason}") from error


def _local_folder(source: str | Path) -> Path:
    """The folder itself, or the local copy of a hub name, fetched if need be; its config names a known model."""
    folder = Path(source).expanduser()
    if not folder.is_dir():
        if folder.is_file():
            raise ModelError(f"{source}: is a file; a model is a folder with config.json (convert a GGUF file first)")
        if not _HUB_NAME.fullmatch(str(source)):
            raise ModelError(f"{source}: no such model folder")
        folder = _hub_snapshot(str(source))
    config = _read_config(folder)
    model_type = config.get("model_type")
    if model_type not in transformers.CONFIG_MAPPING:
        if "auto_map" in config:
            raise ModelError(f"{folder}: {_NEEDS_CODE}")
        known = f"transformers {transformers.__version__}"
        raise ModelError(f"{folder}: config.json has model_type {model_type!r}, which {known} does not know")
    return folder


def _hub_snapshot(name: str) -> Path:
    # Imported here: only a hub name needs it. One request decides whether there is a network, where from_pretrained
    # would retry every file for half a minute.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_FILES_NOT_NEEDED))
    except RepositoryNotFoundError:
        raise ModelError(f"{name}: neither a folder here nor a model the hub lets you read") from None
    except LocalEntryNotFoundError:
        raise ModelError(f"{name}: no such folder, not in the local hub cache, and the hub cannot be reached") from None
    except (HfHubHTTPError, OSError) as error:
        raise ModelError(f"{name}: cannot be downloaded: {_one_line(error)}") from None


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        adapter = (folder / "adapter_config.json").exists()
        mend = "it is an adapter; merge it into its base model first" if adapter else "is it a transformers model?"
        raise ModelError(f"{folder}: has no config.json; {mend}") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read: {_one_line(error)}") from None
    if not isinstance(config, dict):
        raise ModelError(f"{path}: must hold a JSON object")
    return config


def _check_weights_present(folder: Path) -> None:
    if any(folder.glob("*.safetensors")):
        return
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt*")):
        raise ModelError(f"{folder}: has only pickled weights, which are never loaded; save it as safetensors first")
    raise ModelError(f"{folder}: has no weights (*.safetensors)")


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _LONGEST_REASON else text[:_LONGEST_REASON] + "..."


def _some(names: Any, shown: int = 3) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - shown} more" if len(ordered) > shown else ""
    return ", ".join(ordered[:shown]) + more
