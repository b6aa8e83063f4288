"""The estimators written down as their sums, in plain Python floats. Slow, and meant to be checked by eye."""

from __future__ import annotations

import math
from dataclasses import dataclass

Row = list[float]


@dataclass(frozen=True)
class Options:
    estimator: str
    window: int = 100
    rho_clip: float = 1.2
    c_clip: float = 1.1
    gamma: float = 1.0
    lam: float = 1.0


def response_targets(values: Row, rewards: Row, log_ratios: Row, bootstrap: float, o: Options) -> tuple[Row, Row]:
    """Targets and advantages of one response given by its policy tokens alone."""
    last = len(values) - 1
    w = [math.exp(x) for x in log_ratios]
    rho = [min(o.rho_clip, x) for x in w]
    c = [o.lam * min(o.c_clip, x) for x in w]
    v = [*values, bootstrap]
    delta = [rewards[t] + o.gamma * v[t + 1] - v[t] for t in range(last + 1)]
    targets = [_target(s, last, v, rewards, rho, c, delta, bootstrap, o) for s in range(last + 1)]
    following = [*targets[1:], bootstrap]
    if o.estimator in ("gae", "monte_carlo"):
        advantages = [targets[s] - v[s] for s in range(last + 1)]
    else:
        advantages = [rewards[s] + o.gamma * following[s] - v[s] for s in range(last + 1)]
    return targets, advantages


def _target(
    s: int, last: int, v: Row, rewards: Row, rho: Row, c: Row, delta: Row, bootstrap: float, o: Options
) -> float:
    span = range(s, last + 1)
    if o.estimator == "monte_carlo":
        return sum(o.gamma ** (t - s) * rewards[t] for t in span) + o.gamma ** (last + 1 - s) * bootstrap
    if o.estimator == "gae":
        return v[s] + sum((o.gamma * o.lam) ** (t - s) * delta[t] for t in span)
    if o.estimator == "vtrace":
        return v[s] + sum(o.gamma ** (t - s) * math.prod(c[s:t]) * rho[t] * delta[t] for t in span)
    if o.estimator == "capped":
        return v[s] + sum(o.gamma ** (t - s) * math.prod(c[s : min(t, s + o.window)]) * rho[t] * delta[t] for t in span)
    j = min(s + o.window, last)
    return v[s] + sum(
        o.gamma ** (t - s) * math.prod(c[s : min(t, j)]) * (rho[t] if t < j else 1.0) * delta[t] for t in span
    )


def window_weight(s: int, log_ratios: Row, o: Options) -> float:
    """``gamma^{j-s} Pi_k(s)``."""
    j = min(s + o.window, len(log_ratios) - 1)
    return math.prod(o.gamma * o.lam * min(o.c_clip, math.exp(log_ratios[i])) for i in range(s, j))


def path_window(s: int, log_ratios: Row, budget: float, c_clip: float) -> int:
    """``j(s) - s`` by walking forward."""
    last = len(log_ratios) - 1
    spent = 0.0
    for j in range(s, last):
        spent += abs(min(math.log(c_clip), log_ratios[j]))
        if spent > budget:
            return j + 1 - s
    return last - s


def batch_targets(
    values: list[Row],
    rewards: list[Row],
    log_ratios: list[Row],
    policy_mask: list[list[bool]],
    bootstrap: Row | None,
    o: Options,
) -> tuple[list[Row], list[Row]]:
    """``[B][T]`` targets and advantages, 0 at non-policy tokens; rewards there go to the policy token before them."""
    targets = [[0.0] * len(row) for row in values]
    advantages = [[0.0] * len(row) for row in values]
    for b, mask in enumerate(policy_mask):
        places = [t for t, is_policy in enumerate(mask) if is_policy]
        if not places:
            continue
        earned = dict.fromkeys(places, 0.0)
        for t, reward in enumerate(rewards[b]):
            before = [p for p in places if p <= t]
            if before:
                earned[before[-1]] += reward
        target, advantage = response_targets(
            [values[b][t] for t in places],
            [earned[t] for t in places],
            [log_ratios[b][t] for t in places],
            0.0 if bootstrap is None else bootstrap[b],
            o,
        )
        for i, t in enumerate(places):
            targets[b][t], advantages[b][t] = target[i], advantage[i]
    return targets, advantages
