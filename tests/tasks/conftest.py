"""A real small model for the tests that want one, and ``real_model`` to import."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import real_model


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of SmolLM2-135M-Instruct; skips where the packages that hold and convert it are absent."""
    if not real_model.installed():
        pytest.skip(f"needs {real_model.PACKAGE}, {' and '.join(real_model.gguf.REQUIRED_PACKAGES)}")
    return real_model.gguf.import_gguf(real_model.PACKAGE, tmp_path_factory.mktemp("model") / "smollm2")
