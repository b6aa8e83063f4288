"""The doctor for verl: its version, the plug-in in driver and workers, and the traps of its configuration."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from brace_rl.doctor import fresh_process
from brace_rl.doctor.examination import Examination, Request
from brace_rl.doctor.settings import with_overrides
from brace_rl.doctor.verl_probe import GROUP, probe
from brace_rl.errors import BraceError
from brace_rl.integrations.finding import Finding
from brace_rl.integrations.verl.checks import TRAINERS, config_findings
from brace_rl.integrations.verl.versions import PATCHED_MODULES, SUPPORTED, Route, route_for
from brace_rl.integrations.versions import UnsupportedVersionError

PLUGIN = "brace_rl.integrations.verl.plugin"
PROBE = "brace_rl.doctor.verl_probe"


def examine(request: Request) -> Examination:
    """Look at the installation, then at the configuration if there is one."""
    driver = _ask_process()
    facts = [("verl", driver["verl"] or "not installed"), ("brace-rl", driver["brace"] or "not installed")]
    findings: list[Finding] = []
    route: Route = "trainers"
    if driver["verl"] is None:
        findings.append(Finding("error", "verl: not installed", f"install one that is supported: {SUPPORTED}"))
    else:
        try:
            route = route_for(driver["verl"])
        except UnsupportedVersionError as error:
            findings.append(Finding("error", str(error), "pip install 'verl>=0.9,<0.10'"))
        else:
            more_facts, more = _plugin(driver, route)
            facts += more_facts
            findings += more
            if request.workers:
                more_facts, more = _workers(route)
                facts += more_facts
                findings += more
    if request.config is not None or request.overrides:
        settings = _settings(request)
        found = config_findings(settings, route=route)
        facts.append(("configuration", f"{len(found)} found" if found else "good"))
        findings += found
    return Examination(facts=tuple(facts), findings=tuple(findings))


def _ask_process() -> dict[str, Any]:
    """verl loads its plug-ins but once, so a process that asks is a new one."""
    return fresh_process.ask(PROBE, about="verl")


def _expected(route: Route) -> list[str]:
    return sorted(TRAINERS) if route == "trainers" else list(PATCHED_MODULES)


def _plugin(driver: dict[str, Any], route: Route) -> tuple[list[tuple[str, str]], list[Finding]]:
    names = sorted(name for name, value in driver["plugins"].items() if value == PLUGIN)
    facts = [("plug-in", f"entry point {names[0]} of {GROUP}" if names else "no entry point")]
    facts.append(("driver", _state(driver, route)))
    if set(_expected(route)) <= set(driver["registered"]):
        return facts, []
    if driver["error"]:
        return facts, [Finding("error", f"verl's trainers cannot be imported: {driver['error']}", _import_mend(driver))]
    return facts, [Finding("error", "driver: verl has not loaded the plug-in", _loading_mend(names))]


def _state(answer: dict[str, Any], route: Route) -> str:
    registered = ", ".join(answer["registered"]) or "nothing"
    return f"{registered} {'registered' if route == 'trainers' else 'patched'}"


def _import_mend(driver: dict[str, Any]) -> str:
    missing = "transfer_queue" in driver["error"] or "cachetools" in driver["error"]
    return "pip install TransferQueue cachetools" if missing else "python -c 'import verl.trainer.ppo.v1' shows where"


def _loading_mend(names: list[str]) -> str:
    policy = os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto").strip().lower()
    if not names:
        return f"pip install brace-rl in this environment, or set VERL_USE_EXTERNAL_MODULES={PLUGIN}"
    if policy not in ("auto", "") and names[0] not in [name.strip() for name in policy.split(",")]:
        return f"VERL_USE_EXTERNAL_PLUGINS={policy} keeps it out: unset it, or add {names[0]}"
    return f"set VERL_USE_EXTERNAL_MODULES={PLUGIN}, whose errors verl does not hide"


def _workers(route: Route) -> tuple[list[tuple[str, str]], list[Finding]]:
    """Probe a Ray worker on every node: of the cluster in RAY_ADDRESS, else of one started here and stopped again."""
    if find_spec("ray") is None:
        return [], [Finding("error", "workers: ray is not installed", "pip install 'ray[default]'")]
    address = os.environ.get("RAY_ADDRESS")
    if not address:  # read when Ray is imported; naming the address alone is overruled by one that others can reach
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    import ray

    local: dict[str, Any] = {"num_cpus": 1, "include_dashboard": False, "_node_ip_address": "127.0.0.1"}
    try:
        ray.init(**({"address": address} if address else local), log_to_driver=False, logging_level="ERROR")
    except Exception as error:  # Ray raises whatever its parts do.
        why = f"workers: Ray cannot be {'joined' if address else 'started'}: {' '.join(str(error).split())}"
        return [], [Finding("error", why, "start or name a cluster (RAY_ADDRESS), or leave workers out: --no-workers")]
    try:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On

        nodes = [node for node in ray.nodes() if node["Alive"]]
        task = ray.remote(num_cpus=0)(probe)
        asked = [task.options(scheduling_strategy=On(node["NodeID"], soft=False)).remote() for node in nodes]
        findings, good = [], 0
        for node, answer in zip(nodes, asked, strict=True):
            where = f"worker on {node['NodeManagerAddress']}"
            try:
                found = ray.get(answer, timeout=fresh_process.SECONDS)
            except ray.exceptions.RayError as error:
                why = " ".join(str(error).split())[-200:]
                findings.append(Finding("error", f"{where}: {why}", "install brace-rl and verl on that node"))
                continue
            if set(_expected(route)) <= set(found["registered"]):
                good += 1
            else:
                why = found["error"] or _state(found, route)
                findings.append(Finding("error", f"{where}: {why}", "the same environment on every node"))
        return [("workers", f"registered on {good} of {len(nodes)} nodes")], findings
    finally:
        ray.shutdown()


def _settings(request: Request) -> dict[str, Any]:
    if request.config is not None:
        return with_overrides(request.config, request.overrides)
    return _composed(request.overrides)


def _composed(overrides: tuple[str, ...]) -> dict[str, Any]:
    """verl's default configuration with overrides, composed as its own command does it."""
    spec = find_spec("verl")
    if spec is None or not spec.submodule_search_locations or find_spec("hydra") is None:
        raise BraceError("settings without a file need verl's defaults, and verl is not installed; name a file")
    from hydra import compose, initialize_config_dir  # type: ignore[import-not-found]
    from hydra.errors import HydraException  # type: ignore[import-not-found]
    from omegaconf import OmegaConf  # type: ignore[import-not-found]
    from omegaconf.errors import OmegaConfBaseException  # type: ignore[import-not-found]

    folder = Path(next(iter(spec.submodule_search_locations))) / "trainer" / "config"
    try:
        with initialize_config_dir(config_dir=str(folder), version_base=None):
            config = OmegaConf.to_container(compose(config_name="ppo_trainer", overrides=list(overrides)))
    except (HydraException, OmegaConfBaseException) as error:
        raise BraceError(f"verl would refuse these settings: {' '.join(str(error).split())}") from None
    return dict(config) if isinstance(config, dict) else {}
