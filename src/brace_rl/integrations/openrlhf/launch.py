"""What OpenRLHF's command does, with BRACE's experience maker. Imports Ray, and OpenRLHF in the end."""

from __future__ import annotations

import json
import os
import runpy
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from brace_rl.errors import ConfigError
from brace_rl.integrations.checking import refuse
from brace_rl.integrations.openrlhf.checks import config_findings
from brace_rl.integrations.openrlhf.hook import HOOK, install
from brace_rl.integrations.openrlhf.options import VARIABLE, settings_from_arguments, split_arguments
from brace_rl.integrations.openrlhf.versions import DISTRIBUTION, INSTALL, check_openrlhf

COMMAND = "openrlhf.cli.train_ppo_ray"

PASSED_ON = {"TOKENIZERS_PARALLELISM": "true", "NCCL_DEBUG": "WARN", "RAY_ENABLE_ZERO_COPY_TORCH_TENSORS": "1"}
"""Environment variables that OpenRLHF gives to its workers, and its defaults: it leaves a Ray that runs as it is."""


def launch(arguments: Sequence[str]) -> None:
    """Check the settings, start Ray, and run OpenRLHF's command.

    Args:
        arguments: OpenRLHF's own, and BRACE's as ``--brace.NAME VALUE``.

    Raises:
        ConfigError: an option of BRACE, or a setting that keeps it from working.
    """
    node, rest = split_arguments(arguments)
    try:
        check_openrlhf(version(DISTRIBUTION))
    except PackageNotFoundError:
        raise ConfigError(f"OpenRLHF is not installed; {INSTALL}") from None
    if not {"-h", "--help"} & set(rest):
        findings = config_findings(settings_from_arguments(rest), node)
        refuse(findings)
        for finding in findings:
            sys.stderr.write(f"{finding.severity}: {finding.what}: {finding.mend}\n")
        _start_ray(node)
    install()
    sys.argv = [sys.argv[0], *rest]
    runpy.run_module(COMMAND, run_name="__main__", alter_sys=True)


def runtime_environment(node: dict[str, Any]) -> dict[str, Any]:
    """What Ray does in every worker: the hook, and the environment that OpenRLHF and it want."""
    variables = {name: os.environ.get(name, default) for name, default in PASSED_ON.items()}
    return {"env_vars": variables | {VARIABLE: json.dumps(node)}, "worker_process_setup_hook": HOOK}


def _start_ray(node: dict[str, Any]) -> None:
    """Start or join Ray as OpenRLHF would, before it does."""
    import ray

    os.environ[VARIABLE] = json.dumps(node)
    ray.init(runtime_env=runtime_environment(node))
