"""Which cells a comparison has, what each must resolve to, and what all must share. Torch-free."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from brace_rl import __version__
from brace_rl.compare.variants import METHOD_KEYS, Variant, parse_variant
from brace_rl.config import Config, load_config
from brace_rl.errors import ConfigError
from brace_rl.methods import own_settings
from brace_rl.overrides import parse_text

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

START_METHOD = "ppo"
"""What a warm start is made under; it only has to be valid, the start is taken before the first trainer step."""

START: Mapping[str, str] = {
    "optim.steps": "1",
    "optim.critic_warmup_steps": "0",
    "optim.critic_warmup_until": "0",
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
        method: name of its row.
        base: the method without settings of its own, which ``brace train --method`` takes.
        name: of its folder; holds a digest of everything the run depends on.
        settings: ``section.key`` -> text, over the recipe and ``base``.
        config: what these resolve to.
    """

    method: str
    base: str
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
        methods: names of the rows, in order.
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

    Args:
        methods: as :func:`~brace_rl.compare.variants.parse_variant` takes them.
        overrides: ``section.key`` -> text, for all methods alike.

    Raises:
        ConfigError: an unknown method, a recipe or setting that does not fit a method or makes it another one, or
            methods that would not have the same budget or are the same; one line.
    """
    for key, option in RESERVED.items():
        if key in overrides:
            raise ConfigError(f"--{key}: a comparison sets it itself; use {option}")
    variants = [parse_variant(text) for text in methods]
    _check_overrides(variants, overrides)
    settings = {**DEFAULTS, **overrides}
    recipe_config = load_config(recipe, _without_method_sections(settings), method=START_METHOD)
    needs_start = not recipe_config.model.path or recipe_config.warm_start.steps > 0
    starts = {seed: _start(recipe, settings, seed, out) for seed in seeds} if needs_start else {}
    _check_methods(recipe, variants, staleness, settings)
    cells = [
        _cell(recipe, settings, variant, s, seed, starts.get(seed), out)
        for seed in seeds
        for s in staleness
        for variant in variants
    ]
    names = [variant.name for variant in variants]
    return Plan(recipe, names, staleness, seeds, list(starts.values()), cells, overrides)


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


def actor_steps(config: Config) -> str:
    """Trainer steps that train the actor. Those of the critic's warm-up do not, and without a critic there are none."""
    optim = config.optim
    if config.algorithm.value_target == "none" or not optim.critic_warmup_steps:
        return str(optim.steps)
    least, most = optim.steps - optim.critic_warmup_steps, optim.steps - 1
    return f"{least} to {most}" if optim.critic_warmup_until and least < most else str(least)


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


def _check_overrides(variants: Sequence[Variant], overrides: Mapping[str, str]) -> None:
    """No setting for all takes away what makes one of them."""
    for variant in variants:
        own = own_settings(variant.method) | {key: parse_text(text) for key, text in variant.settings.items()}
        for key, text in overrides.items():
            if key in own and parse_text(text) != own[key]:
                raise ConfigError(
                    f"--{key} {text}: method {variant.name} sets {key} = {own[key]} itself and would be another one "
                    "under its name; leave one of the two out"
                )


def _check_methods(
    recipe: Path, variants: Sequence[Variant], staleness: Sequence[int], settings: Mapping[str, str]
) -> None:
    """Every method with every staleness resolves, to the same but for what makes the method, and no two alike."""
    resolved: dict[str, Config] = {}
    first: dict[str, dict[str, Any]] | None = None
    for variant in variants:
        method = variant.name
        for s in staleness:
            own = {**settings, **variant.settings, "schedule.max_staleness": str(s)}
            try:
                config = load_config(recipe, own, method=variant.method)
            except ConfigError as error:
                raise ConfigError(f"method {method}, S = {s}: {error}") from None
        if same := next((other for other, known in resolved.items() if known == config), None):
            raise ConfigError(f"method {method}: every setting is that of {same}; leave one of them out")
        resolved[method] = config
        shared = _shared(config)
        first = first or shared
        for section, table in first.items():
            for key, value in table.items():
                if shared[section].get(key) != value:
                    raise ConfigError(
                        f"method {method}: {section}.{key} is {shared[section].get(key)} and that of "
                        f"{next(iter(resolved))} is {value}, which is not the same budget; give all the same with "
                        f"--{section}.{key}"
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
    recipe: Path,
    settings: Mapping[str, str],
    variant: Variant,
    staleness: int,
    seed: int,
    start: Start | None,
    out: Path,
) -> Cell:
    own = {
        **settings,
        **variant.settings,
        "schedule.max_staleness": str(staleness),
        "run.seed": str(seed),
        "run.root": str(out / "cells"),
    }
    if start is not None:
        own |= {"model.path": str(start_model(out, start.name)), "warm_start.steps": "0"}
    config = load_config(recipe, own, method=variant.method)
    chosen = {"start": start.name if start else config.model.path, **_chosen(config)}
    name = f"{variant.stem}-S{staleness}-seed{seed}-{_digest(chosen)}"
    own["run.name"] = name
    config = load_config(recipe, own, method=variant.method)
    return Cell(variant.name, variant.method, staleness, seed, name, own, config)


def _without_method_sections(settings: Mapping[str, str]) -> dict[str, str]:
    """Without ``algorithm`` and ``actor``: another method may not have the keys given for the compared ones."""
    return {key: value for key, value in settings.items() if key.partition(".")[0] not in ("algorithm", "actor")}


def _digest(settings: Mapping[str, Any]) -> str:
    text = json.dumps({"version": __version__, **settings}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:DIGEST_LENGTH]
