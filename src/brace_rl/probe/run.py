"""From a run folder to a probe: which models, which states, what they are worth."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from brace_rl.config import Config, load_resolved_config
from brace_rl.errors import DataError
from brace_rl.probe.checkpoints import check_format, choose_pair, load_critic
from brace_rl.probe.continuations import Continuations, play_on
from brace_rl.probe.estimate import Floats, Group, Measured, Sample, by_position
from brace_rl.probe.notes import notes
from brace_rl.probe.options import FEWEST_CONTINUATIONS, Options, check_reachable
from brace_rl.probe.prefixes import logged_responses, sample_responses
from brace_rl.probe.replay import check_replay
from brace_rl.probe.states import Response, State, Turns, cut_responses
from brace_rl.probe.values import state_values
from brace_rl.tasks import build_task
from brace_rl.tasks.base import Task
from brace_rl.training.engines.embedded import EmbeddedEngine
from brace_rl.training.models import Critic, load_actor, load_tokenizer, resolve_device

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Report = Callable[[str, int, int], None]
"""``report(what, finished, total)``."""


@dataclass(frozen=True)
class Parts:
    """What is measured.

    Attributes:
        load_behavior, load_target: the actors of mu and of pi, loaded one after the other, so that both are never in
            memory.
        critic: of pi's checkpoint.
        logged: responses to cut; None: sample them under mu.
    """

    config: Config
    task: Task
    tokenizer: PreTrainedTokenizerBase
    load_behavior: Callable[[], PreTrainedModel]
    load_target: Callable[[], PreTrainedModel]
    critic: Critic
    logged: list[Response] | None = None


@dataclass(frozen=True)
class Measurement:
    """States with all that was measured at them; ``pi`` and ``mu`` hold those left out of ``states`` too."""

    responses: list[Response]
    states: list[State]
    sample: Sample
    pi: Continuations
    mu: Continuations


@dataclass(frozen=True)
class Probe:
    """A finished probe of a run."""

    run: str
    step: int
    behavior_step: int
    max_staleness: int
    options: Options
    measurement: Measurement
    overall: Group
    positions: list[Group]
    notes: list[str]

    def to_dict(self) -> dict[str, Any]:
        """For ``probe.json``; ``states`` holds what every state was found to be worth."""
        m = self.measurement
        return {
            "run": self.run,
            "step": self.step,
            "behavior_step": self.behavior_step,
            "max_staleness": self.max_staleness,
            "options": asdict(self.options),
            "overall": _group_dict(self.overall),
            "positions": [_group_dict(group) for group in self.positions],
            "notes": self.notes,
            "states": [
                {
                    "prompt_id": state.problem.id,
                    "position": self.options.positions.label(state.position),
                    "token": state.token,
                    "response_token": state.cut,
                    "value": float(m.sample.values[i]),
                    "returns_pi": [_number(x) for x in m.sample.returns_pi[i].tolist()],
                    "returns_mu": [_number(x) for x in m.sample.returns_mu[i].tolist()],
                }
                for i, state in enumerate(m.states)
            ],
        }


def probe_run(run_dir: Path, options: Options, report: Report = lambda what, finished, total: None) -> Probe:
    """Measure the run in ``run_dir``, of which nothing is changed.

    Raises:
        BraceError: not a run folder, or it lacks what the options ask for.
    """
    config = load_resolved_config(run_dir)
    staleness = config.schedule.max_staleness
    pair = choose_pair(run_dir, step=options.step, behavior_step=options.behavior_step, max_staleness=staleness)
    for checkpoint in {pair.target, pair.behavior}:
        check_format(checkpoint)
    device = resolve_device(options.device or config.model.device)
    critic = load_critic(pair.target, device)  # before minutes of sampling, for it may not be there
    check_reachable(options.positions, config.rollout.max_response_tokens)
    task = build_task(config.task, config.warm_start, config.run.seed)
    tokenizer = load_tokenizer(pair.target / "actor")
    logged = None
    if options.prefixes == "rollouts":
        logged = logged_responses(
            run_dir,
            options.prompts,
            task=task,
            tokenizer=tokenizer,
            step=pair.step,
            behavior_step=pair.behavior_step,
        )
    parts = Parts(
        config=config,
        task=task,
        tokenizer=tokenizer,
        load_behavior=lambda: load_actor(pair.behavior / "actor", dtype=config.model.dtype, device=device),
        load_target=lambda: load_actor(pair.target / "actor", dtype=config.model.dtype, device=device),
        critic=critic,
        logged=logged,
    )
    measurement = measure_parts(parts, options, report)
    labels = [options.positions.label(i) for i in range(len(options.positions.places))]
    overall, positions = by_position(measurement.sample, labels, seed=options.seed)
    return Probe(
        run=str(run_dir),
        step=pair.step,
        behavior_step=pair.behavior_step,
        max_staleness=staleness,
        options=options,
        measurement=measurement,
        overall=overall,
        positions=positions,
        notes=notes(overall, positions, measurement, options),
    )


def measure_parts(parts: Parts, options: Options, report: Report = lambda what, finished, total: None) -> Measurement:
    """Cut responses into states, play on from them under mu and under pi, and ask the critic."""
    config, task, tokenizer = parts.config, parts.task, parts.tokenizer
    turns = Turns(task, tokenizer)
    actor = parts.load_behavior()
    responses = parts.logged
    if responses is None:
        prompts = min(options.prompts, len(task.eval_problems()))
        report("prefixes under mu", 0, prompts)
        responses = sample_responses(
            prompts,
            engine=_engine(actor, parts),
            task=task,
            tokenizer=tokenizer,
            config=config,
            seed=options.seed,
            progress=lambda finished: report("prefixes under mu", finished, prompts),
        )
    states = cut_responses(responses, options.positions, turns, max_response_tokens=config.rollout.max_response_tokens)
    entered = {state.response for state in states if state.actions}
    check_replay([responses[i] for i in sorted(entered)], task=task, tokenizer=tokenizer, config=config)

    def continuations(actor: PreTrainedModel, what: str) -> Continuations:
        report(what, 0, len(states))
        return play_on(
            states,
            engine=_engine(actor, parts),
            task=task,
            tokenizer=tokenizer,
            config=config,
            samples=options.continuations,
            seed=options.seed,
            progress=lambda finished: report(what, finished, len(states)),
        )

    mu = continuations(actor, "states under mu")
    del actor
    pi = continuations(parts.load_target(), "states under pi")
    values = state_values(responses, states, critic=parts.critic, config=config)
    return _measurement(responses, states, values, pi, mu)


def _measurement(
    responses: list[Response], states: list[State], values: Floats, pi: Continuations, mu: Continuations
) -> Measurement:
    """Leave out pairs of which one half could not be judged, and states left without two pairs.

    Raises:
        DataError: a position is left without a state.
    """
    unjudged = np.isnan(pi.returns) | np.isnan(mu.returns)
    kept = np.flatnonzero((~unjudged).sum(1) >= FEWEST_CONTINUATIONS)
    if {states[i].position for i in kept} != {state.position for state in states}:
        raise DataError("too few continuations could be judged at some position; see that the judge answers")
    states = [states[i] for i in kept]
    sample = Sample(
        prompts=np.array([state.response for state in states]),
        positions=np.array([state.position for state in states]),
        tokens=np.array([state.token for state in states]),
        values=values[kept],
        returns_pi=np.where(unjudged, np.nan, pi.returns)[kept],
        returns_mu=np.where(unjudged, np.nan, mu.returns)[kept],
    )
    return Measurement(responses, states, sample, pi, mu)


def _engine(actor: PreTrainedModel, parts: Parts) -> EmbeddedEngine:
    """A new engine each time: with the same history, equal weights give equal draws to the last bit."""
    return EmbeddedEngine(actor, parts.tokenizer, slots=parts.config.eval.slots)


def _group_dict(group: Group) -> dict[str, Any]:
    return {
        "position": group.label,
        "states": group.states,
        "prompts": group.prompts,
        "token_mean": group.token_mean,
        "pairing": _number(group.pairing),
        "figures": {name: _measured_dict(measured) for name, measured in group.figures.items()},
    }


def _measured_dict(measured: Measured) -> dict[str, Any]:
    return {
        "value": measured.estimate.value,
        "low": _number(measured.estimate.low),
        "high": _number(measured.estimate.high),
        "noise_share": _number(measured.noise_share),
        "needed": None if measured.needed is None else asdict(measured.needed),
    }


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
