"""Which cells a comparison has, what each must resolve to, and what all must share. Torch-free."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from brace_rl import __version__
from brace_rl.config import Config, load_config
from brace_rl.errors import ConfigError
from brace_rl.methods import method_settings

DIGEST_LENGTH = 10
"""Hexadecimal digits of a SHA-256 in a folder's name."""

DEFAULTS: Mapping[str, str] = {
    "schedule.mode": "lag",
    "schedule.sync_every": "1",
    "schedule.learner_threads": "1",
    "schedule.rollout_threads": "1",
    "run.trackers": "[]",
    "run.keep_checkpoints": "1",
}
"""Settings of every cell unless the command line says otherwise."""

RESERVED: Mapping[str, str] = {
    "run.seed": "--seeds and --seed",
    "schedule.max_staleness": "--staleness",
    "run.name": "--out",
    "run.root": "--out",
}
"""Settings that a comparison varies or places itself -> the options that stand for them."""

METHOD_KEYS: Mapping[str, Sequence[str]] = {
    "optim": ("critic_updates", "freeze_critic_attention", "critic_warmup_until"),
}
"""Keys a method may set outside ``algorithm`` and ``actor``, which are a method's own."""

START_METHOD = "ppo"
"""What a warm start is made under; it only has to be valid, the start is taken before the first trainer step."""

START: Mapping[str, str] = {
    "optim.steps": "1",
    "optim.critic_warmup_steps": "0",
    "optim.minibatches": "1",
    "optim.lr_reference_staleness": "0",
    "rollout.prompts_per_step": "1",
    "rollout.samples_per_prompt": "1",
    "schedule.mode": "sync",
    "schedule.max_staleness": "0",
    "eval.every": "0",
    "eval.final_problems": "1",
    "run.samples_per_step": "0",
}
"""Settings of the run that makes a warm start: everything after the warm start as small as can be."""

START_OPTIM = ("betas", "weight_decay", "max_grad_norm")
"""Settings of ``optim`` that a warm start depends on."""


@dataclass(frozen=True)
class Start:
    """The warm-started actor that all cells of a seed begin with.

    Attributes:
        name: of its folder; holds a digest of everything it depends on.
        settings: ``section.key`` -> text, over the recipe.
    """

    seed: int
    name: str
    settings: Mapping[str, str]


@dataclass(frozen=True)
class Cell:
    """One run of the comparison.

    Attributes:
        name: of its folder; holds a digest of everything the run depends on.
        settings: ``section.key`` -> text, over the recipe and the method.
        config: what these resolve to.
    """

    method: str
    staleness: int
    seed: int
    name: str
    settings: Mapping[str, str]
    config: Config

    @property
    def label(self) -> str:
        """For people."""
        return f"{self.method}, S = {self.staleness}, seed {self.seed}"


@dataclass(frozen=True)
class Plan:
    """A whole comparison, checked.

    Attributes:
        recipe: as named by the user.
        starts: one per seed; empty where the recipe starts from a model as it is.
        cells: seed by seed, so that a sweep which is stopped has whole seeds.
        overrides: settings given on the command line.
    """

    recipe: Path
    methods: Sequence[str]
    staleness: Sequence[int]
    seeds: Sequence[int]
    starts: Sequence[Start]
    cells: Sequence[Cell]
    overrides: Mapping[str, str]

    @property
    def steps(self) -> int:
        """Trainer steps of every cell."""
        return self.cells[0].config.optim.steps


def make_plan(
    recipe: Path,
    *,
    methods: Sequence[str],
    staleness: Sequence[int],
    seeds: Sequence[int],
    overrides: Mapping[str, str],
    out: Path,
) -> Plan:
    """All cells, each checked as ``brace train`` would check it.

    Raises:
        ConfigError: an unknown method, a recipe or setting that does not fit a method, or methods that would not have
            the same budget; one line.
    """
    for key, option in RESERVED.items():
        if key in overrides:
            raise ConfigError(f"--{key}: a comparison sets it itself; use {option}")
    for method in methods:
        method_settings(method)
    settings = {**DEFAULTS, **overrides}
    recipe_config = load_config(recipe, _without_method_sections(settings), method=START_METHOD)
    needs_start = not recipe_config.model.path or recipe_config.warm_start.steps > 0
    starts = {seed: _start(recipe, settings, seed, out) for seed in seeds} if needs_start else {}
    _check_methods(recipe, methods, staleness, settings)
    cells = [
        _cell(recipe, settings, method, s, seed, starts.get(seed), out)
        for seed in seeds
        for s in staleness
        for method in methods
    ]
    return Plan(recipe, methods, staleness, seeds, list(starts.values()), cells, overrides)


def identity(config: Config) -> dict[str, Any]:
    """The settings the course of a run depends on, as plain data: without the places of its files and its model."""
    settings = config.model_dump(mode="json")
    for section, name in (("run", "name"), ("run", "root"), ("model", "path")):
        del settings[section][name]
    return settings


def method_parts(config: Config) -> dict[str, dict[str, Any]]:
    """What makes the method of a cell, every value of it: section -> key -> value."""
    settings = config.model_dump(mode="json")
    parts = {section: settings[section] for section in ("algorithm", "actor")}
    own = {section: {key: settings[section][key] for key in keys} for section, keys in METHOD_KEYS.items()}
    return parts | {section: keys for section, keys in own.items() if section not in parts and keys}


def _chosen(config: Config) -> dict[str, Any]:
    """What :func:`identity` holds, without values that are the default: a setting added later changes no digest."""
    settings = config.model_dump(mode="json", exclude_defaults=True)
    for section, name in (("run", "name"), ("run", "root"), ("model", "path")):
        settings.get(section, {}).pop(name, None)
    for section, kind in (("task", config.task.name), ("actor", config.actor.rule)):  # whose keys the section's are
        settings.setdefault(section, {})["kind"] = kind
    return {section: keys for section, keys in settings.items() if keys}


def start_model(out: Path, name: str) -> Path:
    """The folder of a finished :class:`Start`."""
    return out / "starts" / name


def _check_methods(recipe: Path, methods: Sequence[str], staleness: Sequence[int], settings: Mapping[str, str]) -> None:
    """Every method with every staleness resolves, and to the same but for what makes the method."""
    first: dict[str, dict[str, Any]] | None = None
    for method in methods:
        for s in staleness:
            try:
                config = load_config(recipe, {**settings, "schedule.max_staleness": str(s)}, method=method)
            except ConfigError as error:
                raise ConfigError(f"method {method}, S = {s}: {error}") from None
        shared = _shared(config)
        first = first or shared
        for section, table in first.items():
            for key, value in table.items():
                if shared[section].get(key) != value:
                    raise ConfigError(
                        f"method {method}: {section}.{key} is {shared[section].get(key)} and that of {methods[0]} is "
                        f"{value}, which is not the same budget; give all the same with --{section}.{key}"
                    )


def _shared(config: Config) -> dict[str, dict[str, Any]]:
    settings = config.model_dump(mode="json", exclude={"algorithm", "actor"})
    for section, keys in METHOD_KEYS.items():
        for key in keys:
            del settings[section][key]
    return settings


def _start(recipe: Path, settings: Mapping[str, str], seed: int, out: Path) -> Start:
    own = {**_without_method_sections(settings), **START, "run.seed": str(seed), "run.root": str(out / "starting")}
    config = load_config(recipe, own, method=START_METHOD)
    chosen = _chosen(config)
    needed = {section: chosen.get(section, {}) for section in ("task", "model", "warm_start")}
    needed["model"] = needed["model"] | {"path": config.model.path}
    needed["task"] = {key: value for key, value in needed["task"].items() if not key.startswith("eval_")}
    needed["optim"] = {key: getattr(config.optim, key) for key in START_OPTIM}
    needed["run"] = {"seed": seed, "threads": config.schedule.learner_threads}
    name = f"seed{seed}-{_digest(needed)}"
    return Start(seed, name, own | {"run.name": name})


def _cell(
    recipe: Path, settings: Mapping[str, str], method: str, staleness: int, seed: int, start: Start | None, out: Path
) -> Cell:
    own = {
        **settings,
        "schedule.max_staleness": str(staleness),
        "run.seed": str(seed),
        "run.root": str(out / "cells"),
    }
    if start is not None:
        own |= {"model.path": str(start_model(out, start.name)), "warm_start.steps": "0"}
    config = load_config(recipe, own, method=method)
    chosen = {"start": start.name if start else config.model.path, **_chosen(config)}
    name = f"{method}-S{staleness}-seed{seed}-{_digest(chosen)}"
    own["run.name"] = name
    return Cell(method, staleness, seed, name, own, load_config(recipe, own, method=method))


def _without_method_sections(settings: Mapping[str, str]) -> dict[str, str]:
    """Without ``algorithm`` and ``actor``: another method may not have the keys given for the compared ones."""
    return {key: value for key, value in settings.items() if key.partition(".")[0] not in ("algorithm", "actor")}


def _digest(settings: Mapping[str, Any]) -> str:
    text = json.dumps({"version": __version__, **settings}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:DIGEST_LENGTH]
