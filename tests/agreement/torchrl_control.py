"""BRACE beside TorchRL's own estimators on CartPole-v1, with stale data: ``make learn-torchrl``.

Networks, loss (``ClipPPOLoss``), optimiser and staleness are the same for all methods; what differs is the module that
writes ``advantage`` and ``value_target``. Every update is made on steps taken by the policy of ``LAG`` updates ago.

Prints a Markdown table over all methods and seeds. With ``--record FILE`` runs are kept there as they end, and those
that are there already are not made again.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import sys
import time
from collections import deque
from collections.abc import Callable
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import NamedTuple

import gymnasium
import numpy as np
import torch
from tensordict import TensorDict
from tensordict.nn import InteractionType, TensorDictModule
from torch import Tensor, nn
from torch.distributions import Categorical
from torchrl.modules import ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE, VTrace

from brace_rl.integrations.torchrl.estimator import BraceEstimator

TASK, OBSERVED, ACTIONS = "CartPole-v1", 4, 2
ENVIRONMENTS, STEPS, UPDATES = 16, 64, 80
LAG = 8
WINDOW = 16
GAMMA, GAE_LAMBDA = 0.99, 0.95
REWARD_SCALE = 0.05
HIDDEN, LEARNING_RATE, GRADIENT_CLIP = 64, 1e-3, 0.5
EPOCHS, MINIBATCHES = 4, 2
PPO_CLIP, ENTROPY, CRITIC_WEIGHT = 0.2, 0.01, 0.5
RECENT_EPISODES = 20
FINAL_SHARE = 0.1
SEEDS = 5
STUDENT_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""Number of runs -> quantile of the interval of their mean."""


class ScoresActionsTaken(nn.Module):
    """Makes TorchRL's ``VTrace`` score the actions in the data: it asks the actor to choose, and gets those."""

    default_interaction_type = InteractionType.DETERMINISTIC

    def __init__(self, actor: ProbabilisticActor) -> None:
        super().__init__()
        self.actor = actor
        self.in_keys = [*actor.in_keys, "action"]

    def get_dist(self, data: TensorDict) -> Categorical:
        self.taken = data["action"]
        return self.actor.get_dist(data)

    def _dist_sample(self, dist: Categorical, interaction_type: InteractionType) -> Tensor:
        return self.taken


def brace(**options: object) -> Callable[..., nn.Module]:
    return lambda actor, critic: BraceEstimator(gamma=GAMMA, actor_network=actor, value_network=critic, **options)


METHODS: dict[str, Callable[..., nn.Module]] = {
    "V-trace of TorchRL": lambda actor, critic: VTrace(gamma=GAMMA, actor_network=actor, value_network=critic),
    "the same, scoring the actions taken": lambda actor, critic: VTrace(
        gamma=GAMMA, actor_network=ScoresActionsTaken(actor), value_network=critic
    ),
    "V-trace of this adapter (no ratio in the advantage)": brace(value_target="vtrace", rho_clip=1.0, c_clip=1.0),
    f"BRACE, window {WINDOW}": brace(window=WINDOW),
    "BRACE, window auto_path": brace(window="auto_path"),
    "Monte-Carlo": brace(value_target="monte_carlo"),
    f"GAE {GAE_LAMBDA} of TorchRL": lambda actor, critic: GAE(gamma=GAMMA, lmbda=GAE_LAMBDA, value_network=critic),
}
COMPARED_WITH = next(iter(METHODS))


class Outcome(NamedTuple):
    """One run.

    Attributes:
        curve: mean return of the last ``RECENT_EPISODES`` episodes, after each update.
        log_ratio: mean ``|log pi - log mu|`` of the actions taken, over the second half of the run.
    """

    curve: list[float]
    log_ratio: float


class Rollouts:
    """Steps of parallel environments as a collector would return them, and the returns of finished episodes.

    Gymnasium's vectorised environments take one step between two episodes, on which the action does nothing: it is
    marked as none under ``("collector", "mask")``.
    """

    def __init__(self, seed: int) -> None:
        self.environments = gymnasium.make_vec(TASK, num_envs=ENVIRONMENTS, vectorization_mode="vector_entry_point")
        self.observed = torch.from_numpy(self.environments.reset(seed=seed)[0])
        self.was_done = np.zeros(ENVIRONMENTS, dtype=bool)
        self.running = np.zeros(ENVIRONMENTS)
        self.returns: deque[float] = deque(maxlen=RECENT_EPISODES)

    @torch.no_grad()
    def collect(self, actor: ProbabilisticActor) -> TensorDict:
        """``[ENVIRONMENTS, STEPS]`` steps of this actor."""
        steps = [self._step(actor) for _ in range(STEPS)]
        observed, action, log_prob, is_step, after, reward, done, terminated = (
            torch.stack(entries, dim=1) for entries in zip(*steps, strict=True)
        )
        return TensorDict(
            {
                "observation": observed,
                "action": action,
                "action_log_prob": log_prob,
                "collector": {"mask": is_step},
                "next": {
                    "observation": after,
                    "reward": REWARD_SCALE * reward[..., None],
                    "done": done[..., None],
                    "terminated": terminated[..., None],
                },
            },
            batch_size=[ENVIRONMENTS, STEPS],
            names=[None, "time"],
        )

    def _step(self, actor: ProbabilisticActor) -> tuple[Tensor, ...]:
        observed = self.observed
        log_probs = actor[0].module(observed).log_softmax(-1)
        action = torch.multinomial(log_probs.exp(), 1)
        after, reward, terminated, truncated, _ = self.environments.step(action[:, 0].numpy())
        is_step, done = ~self.was_done, terminated | truncated
        self.running += reward
        self.returns.extend(self.running[done].tolist())
        self.running[done] = 0.0
        self.observed, self.was_done = torch.from_numpy(after), done
        flags = (torch.from_numpy(flag.copy()) for flag in (done, terminated))
        log_prob = log_probs.gather(1, action)[:, 0]
        gained = torch.from_numpy(reward.astype(np.float32))
        return observed, action[:, 0], log_prob, torch.from_numpy(is_step), self.observed, gained, *flags


def network(outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(OBSERVED, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, outputs)
    )


def run(method: Callable[..., nn.Module], seed: int) -> Outcome:
    """Train once."""
    torch.manual_seed(seed)
    logits = TensorDictModule(network(ACTIONS), in_keys=["observation"], out_keys=["logits"])
    actor = ProbabilisticActor(logits, in_keys=["logits"], distribution_class=Categorical, return_log_prob=True)
    critic = ValueOperator(network(1), in_keys=["observation"])
    loss = ClipPPOLoss(
        actor,
        critic,
        functional=False,
        clip_epsilon=PPO_CLIP,
        entropy_coeff=ENTROPY,
        critic_coeff=CRITIC_WEIGHT,
        loss_critic_type="l2",
        normalize_advantage=True,
    )
    estimator = method(actor, critic)
    parameters = [*actor.parameters(), *critic.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=LEARNING_RATE)
    rollouts = Rollouts(seed)
    stale = copy.deepcopy(actor)
    versions = deque([copy.deepcopy(actor.state_dict())], maxlen=LAG + 1)
    curve, log_ratios = [], []
    for _ in range(UPDATES):
        stale.load_state_dict(versions[0])
        batch = rollouts.collect(stale)
        with torch.no_grad():
            now = actor.get_dist(batch).log_prob(batch["action"])
        log_ratios.append(float((now - batch["action_log_prob"]).abs().mean()))
        estimator(batch)
        steps = batch[batch["collector", "mask"]].detach()
        for _ in range(EPOCHS):
            for part in torch.randperm(len(steps)).chunk(MINIBATCHES):
                terms = loss(steps[part])
                optimizer.zero_grad()
                (terms["loss_objective"] + terms["loss_entropy"] + terms["loss_critic"]).backward()
                nn.utils.clip_grad_norm_(parameters, GRADIENT_CLIP)
                optimizer.step()
        versions.append(copy.deepcopy(actor.state_dict()))
        curve.append(sum(rollouts.returns) / max(1, len(rollouts.returns)))
    return Outcome(curve=curve, log_ratio=sum(log_ratios[UPDATES // 2 :]) / (UPDATES - UPDATES // 2))


def final(curve: list[float]) -> float:
    last = curve[-max(1, round(FINAL_SHARE * len(curve))) :]
    return sum(last) / len(last)


def area(curve: list[float]) -> float:
    return sum(curve) / len(curve)


def interval(figures: list[float]) -> str:
    """Mean and half the width of its 95 % interval."""
    mean = sum(figures) / len(figures)
    if len(figures) < 2:
        return f"{mean:.0f}"
    deviation = math.sqrt(sum((x - mean) ** 2 for x in figures) / (len(figures) - 1))
    return f"{mean:.0f} ± {STUDENT_95[len(figures)] * deviation / math.sqrt(len(figures)):.0f}"


def table(outcomes: dict[tuple[str, int], Outcome]) -> str:
    """All methods: returns, the same less those of the method compared with at the same seeds, and every seed."""
    lines = [
        "| method | final return | area | final, less V-trace's | area, less V-trace's | log ratio | final by seed |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name in METHODS:
        seeds = sorted(seed for method, seed in outcomes if method == name)
        if not seeds:
            continue
        cells = [name]
        for figure in (final, area):
            cells.append(interval([figure(outcomes[name, seed].curve) for seed in seeds]))
        paired = [seed for seed in seeds if (COMPARED_WITH, seed) in outcomes]
        for figure in (final, area):
            less = [figure(outcomes[name, s].curve) - figure(outcomes[COMPARED_WITH, s].curve) for s in paired]
            cells.append("" if name == COMPARED_WITH or not paired else interval(less))
        cells.append(f"{sum(outcomes[name, seed].log_ratio for seed in seeds) / len(seeds):.2f}")
        cells.append(", ".join(f"{final(outcomes[name, seed].curve):.0f}" for seed in seeds))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def recorded(path: Path | None) -> dict[tuple[str, int], Outcome]:
    if path is None or not path.is_file():
        return {}
    runs = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {(x["method"], x["seed"]): Outcome(x["curve"], x["log_ratio"]) for x in runs}


def main() -> int:
    """Train all methods with all seeds and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--methods", nargs="*", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--record", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    outcomes = recorded(asked.record)
    for seed, name in product(range(asked.first_seed, asked.first_seed + asked.seeds), asked.methods):
        if (name, seed) in outcomes:
            continue
        began = time.monotonic()
        outcome = outcomes[name, seed] = run(METHODS[name], seed)
        took = time.monotonic() - began
        print(f"{name}, seed {seed}: final {final(outcome.curve):.0f}, {took:.0f} s", file=sys.stderr, flush=True)
        if asked.record is not None:
            with asked.record.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"method": name, "seed": seed, **outcome._asdict()}) + "\n")
    names = ("torchrl", "tensordict", "gymnasium", "torch")
    print(" | ".join(f"{name} {version(name)}" for name in names) + f" | {TASK}")
    print(f"lag {LAG}, {UPDATES} updates of {ENVIRONMENTS} x {STEPS} steps, area: mean return over all updates\n")
    print(table(outcomes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
