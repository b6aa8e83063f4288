"""Imports point one way, and the core needs torch alone."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "brace_rl"

SHOWING = {"markdown", "pictures", "quantiles"}

MAY_IMPORT = {
    "core": set(),
    "diagnostics": {"core"},
    "actor": {"core", "section", "errors"},
    "tasks": {"section", "errors", "files"},
    "report": {"errors", "files"},
    "oracle": {"core", "actor", "section", "errors", "files", *SHOWING},
    "diagnose": {"core", "diagnostics", "report", "errors", "files"},
    "training": {"core", "actor", "diagnostics", "tasks", "report", "config", "config_checks", "errors", "files"},
    "probe": {"training", "tasks", "report", "diagnose", "config", "errors", "files", *SHOWING},
    "compare": {"config", "methods", "overrides", "section", "diagnose", "report", "errors", "files", *SHOWING},
    "integrations": {"core", "diagnostics", "errors"},
    "doctor": {"integrations", "errors"},
    "bench": {"core", "training", "tasks", "config", "errors", "files"},
    "evaluation": {"training", "tasks", "config", "overrides", "errors", "files"},
}
"""Package -> the other parts of brace_rl it may import."""


def imported_parts(package):
    for path in sorted((SOURCE / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                modules = [
                    f"{node.module}.{alias.name}" if node.module == "brace_rl" else node.module or ""
                    for alias in node.names
                ]
            else:
                continue
            for module in modules:
                parts = module.split(".")
                if parts[0] == "brace_rl" and len(parts) > 1 and parts[1] != "__version__":
                    yield parts[1], path


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_imports_point_one_way(package):
    wrong = {(part, str(path)) for part, path in imported_parts(package) if part not in MAY_IMPORT[package] | {package}}
    assert wrong == set()


def test_the_core_imports_torch_and_the_standard_library_only():
    names = set()
    for path in (SOURCE / "core").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names.add(node.module.split(".")[0])
    assert names - set(sys.stdlib_module_names) <= {"torch", "brace_rl"}


def test_importing_the_core_loads_nothing_heavy_but_torch():
    heavy = ("transformers", "datasets", "ray", "vllm", "matplotlib", "tensorboard", "pydantic", "click", "rich")
    code = f"import sys, brace_rl.core; print([m for m in {heavy!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def calls_in_source():
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                yield ast.unparse(node.func), node, path


def test_nothing_is_evaluated_or_unpickled_from_disk():
    forbidden = {"eval", "exec", "torch.load", "pickle.load", "np.load", "joblib.load", "yaml.load"}
    found = [(name, str(path)) for name, _, path in calls_in_source() if name in forbidden]
    assert found == []


def test_no_call_trusts_code_from_a_model_folder():
    for _, node, path in calls_in_source():
        for keyword in node.keywords:
            if keyword.arg == "trust_remote_code":
                assert isinstance(keyword.value, ast.Constant), path
                assert keyword.value.value is False, path
