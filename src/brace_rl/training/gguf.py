"""Turning a GGUF file (llama.cpp's format) into an ordinary model folder. Nothing is downloaded."""

from __future__ import annotations

import copy
import importlib.metadata
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from brace_rl.errors import ModelError
from brace_rl.files import atomic_directory
from brace_rl.training.models import DTYPES, load_library, load_tokenizer, write_actor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

REQUIRED_PACKAGES = ("gguf", "accelerate")
"""What ``transformers`` needs to read a GGUF file."""


def import_gguf(source: str, out: str | Path, *, dtype: str = "bfloat16") -> Path:
    """Write the model in a GGUF file, its quantised weights expanded, as a ``transformers`` folder; returns ``out``.

    Args:
        source: a ``.gguf`` file, or the name of an installed distribution that ships exactly one.
        out: the new folder, with the tokenizer and, if the file has one, its chat template.
        dtype: "bfloat16" (half the size; rounds far less than the quantisation did) or "float32" (exact).

    Raises:
        ModelError: one line; nothing of that name, packages missing, ``out`` in use, or a file that cannot be read.
        BraceError: ``out`` cannot be written, a full disk included; nothing half-written is left.
    """
    out = Path(out)
    missing = [name for name in REQUIRED_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ModelError(f"reading GGUF files needs {' and '.join(missing)}: pip install {' '.join(missing)}")
    file = find_gguf(source)
    if out.exists() and (out.is_file() or any(out.iterdir())):
        raise ModelError(f"{out}: is in use; name a new folder")
    # Not AutoTokenizer, which first parses the whole file to learn the model's class and ends up with this one.
    tokenizer = load_library(file, lambda: PreTrainedTokenizerFast.from_pretrained(file.parent, gguf_file=file.name))
    model = _plain_model(load_gguf_model(file, DTYPES[dtype]))
    with atomic_directory(out) as folder:
        write_actor(model, tokenizer, folder)
        load_tokenizer(folder)  # refuses what could not be trained with, before it is in place
    return out


def find_gguf(source: str) -> Path:
    """The GGUF file called ``source``: a path, or the only one an installed distribution of that name ships.

    Raises:
        ModelError: there is none, or more than one.
    """
    path = Path(source).expanduser()
    if path.is_file():
        return path
    if path.suffix == ".gguf" or path.exists() or not source:
        raise ModelError(f"{source!r}: no such GGUF file")
    try:
        shipped = importlib.metadata.files(source) or []
    except importlib.metadata.PackageNotFoundError:
        raise ModelError(f"{source}: neither a file nor an installed package; pip install {source}") from None
    files = [Path(str(entry.locate())) for entry in shipped if entry.suffix == ".gguf"]
    found = [file for file in files if file.is_file()]
    if len(found) != 1:
        listed = f": {', '.join(map(str, found))}; name one of them" if found else ""
        raise ModelError(f"{source}: the installed package ships {len(found)} GGUF files{listed}")
    return found[0]


def load_gguf_model(file: Path, dtype: torch.dtype) -> PreTrainedModel:
    """The model in a GGUF file as ``transformers`` loads it: usable, but marked as quantised, which cannot be saved.

    Raises:
        ModelError: the file cannot be read.
    """
    options: dict[str, Any] = {"gguf_file": file.name, "dtype": dtype, "local_files_only": True}
    if hasattr(transformers, "GgufConfig"):
        # Newer versions may keep the weights packed; older ones always expand them.
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    return load_library(file, lambda: AutoModelForCausalLM.from_pretrained(file.parent, **options)).eval()


def _plain_model(quantised: PreTrainedModel) -> PreTrainedModel:
    """A model of the same class that holds the same tensors and knows nothing of quantisation."""
    config = copy.deepcopy(quantised.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    # On "meta" nothing is drawn or allocated: every weight is then taken over from the other model.
    with torch.device("meta"):
        plain = type(quantised)(config)
    plain.load_state_dict(quantised.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = copy.deepcopy(quantised.generation_config)
    return plain
