"""Lets OpenRLHF be imported where the packages that need a GPU are missing: those alone are stood in for.

Its experience maker and trainers name them at import, and use nothing of them while they make experiences.
"""

import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from unittest.mock import MagicMock

GPU_ONLY = ("deepspeed", "vllm", "flash_attn", "bitsandbytes", "optimum")


class _StandIns:
    """Finds a module of any of those packages, empty but for whatever is asked of it."""

    def __init__(self, packages):
        self.packages = packages

    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in self.packages else None

    def create_module(self, spec):
        module = MagicMock(name=spec.name)
        module.__path__, module.__spec__, module.__name__ = [], spec, spec.name
        return module

    def exec_module(self, module): ...


def stand_in():
    """Names of the packages that are stood in for, which are those that are not installed."""
    missing = tuple(name for name in GPU_ONLY if name not in sys.modules and find_spec(name) is None)
    if missing:
        sys.meta_path.append(_StandIns(missing))
    return missing
