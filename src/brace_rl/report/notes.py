"""Sentences about what looks off in a run, each with where to look."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import fmean

from brace_rl.report.run_data import RunData

LOW_ESS = 0.1
MAX_DROPPED_SHARE = 0.10
MAX_TRUNCATED_SHARE = 0.20
MAX_IDENTITY_ERROR = 0.01
MAX_MISMATCH = 0.1
"""Largest |log ratio| at staleness 0 that passes for rounding."""
LOW_WINDOW_WEIGHT = 0.01
HIGH_WINDOW_WEIGHT = 100.0
ROUNDING_DRIFT = 1e-3
"""Largest positive mean log ratio that passes for rounding and chance."""
CRITIC_GRACE_STEPS = 10
"""Steps before a poor critic is worth a remark."""


def notes(run: RunData) -> list[str]:
    """Plain sentences, most basic first; empty when nothing looks off."""
    return [*run.damage, *(sentence for check in _CHECKS if (sentence := check(run)))]


def balance(ledger: dict[str, float]) -> float | None:
    """issued - (consumed + dropped + in flight + buffered): 0 when all are accounted for, None when not counted.

    Buffered prompts are answered, not consumed yet; a ledger that does not tell them apart counts them as in flight.
    """
    names = ("consumed", "dropped", "in_flight")
    if "issued" not in ledger or any(name not in ledger for name in names):
        return None
    return ledger["issued"] - sum(ledger[name] for name in names) - ledger.get("buffered", 0)


def _late_mean(run: RunData, key: str) -> float | None:
    """Mean over the last quarter of the steps that logged ``key``."""
    values = [value for step, value in run.series(key) if step > 0 and math.isfinite(value)]
    return fmean(values[-math.ceil(len(values) / 4) :]) if values else None


def _status(run: RunData) -> str:
    last = int(run.rows[-1]["step"]) if run.rows else 0
    steps = run.setting("optim.steps", 0)
    if not run.training_rows:
        return "No training step was recorded, so there is nothing to draw yet."
    if run.status == "finished":
        return ""
    if run.status == "unfinished":
        return f"There is no summary.json: the run is still going, or was killed, after step {last} of {steps}."
    return f"The run ended early ({run.status}) after step {last} of {steps}."


def _non_finite(run: RunData) -> str:
    first = {key: next((int(s) for s, v in run.series(key) if not math.isfinite(v)), None) for key in run.keys}
    found = [f"{key} (first at step {step})" for key, step in first.items() if step is not None]
    return f"Not finite at some steps: {', '.join(found)}." if found else ""


def _ledger(run: RunData) -> str:
    difference = balance(run.ledger())
    if not difference:
        return ""
    return f"The ledger does not balance: issued − (consumed + dropped + in flight + buffered) = {difference:g}."


def _dropped(run: RunData) -> str:
    ledger = run.ledger()
    issued, dropped = ledger.get("issued", 0), ledger.get("dropped", 0)
    if not issued or dropped / issued <= MAX_DROPPED_SHARE:
        return ""
    return (
        f"{dropped / issued:.0%} of the prompts were dropped as too old, and long responses are dropped most; "
        "raise schedule.max_staleness or set schedule.too_old to wait."
    )


def _bound(run: RunData) -> str:
    bound = run.setting("schedule.max_staleness", None)
    highest = max((value for _, value in run.series("staleness/max") if math.isfinite(value)), default=0.0)
    if not isinstance(bound, int) or highest <= bound:
        return ""
    return f"Tokens of age {highest:g} were consumed although schedule.max_staleness is {bound}."


def _ess(run: RunData) -> str:
    ess = _late_mean(run, "ratio/ess")
    if ess is None or ess >= LOW_ESS:
        return ""
    return f"The effective sample size fell to {ess:.3f} of the tokens: a few carry the update. Lower the staleness."


def _mismatch(run: RunData) -> str:
    fresh = [
        row["ratio/log_abs_max"]
        for row in run.training_rows
        if row.get("staleness/max") == 0 and math.isfinite(row.get("ratio/log_abs_max", math.nan))
    ]
    if not fresh or max(fresh) <= MAX_MISMATCH:
        return ""
    return (
        f"At staleness 0 log-probs of engine and trainer differ by up to {max(fresh):.2g}: they do not evaluate the "
        "same distribution (temperature, top-p, top-k, precision)."
    )


def _identical(run: RunData) -> str:
    row = run.training_rows[-1] if run.training_rows else {}
    # Until the actor has moved and its tokens have aged, ratios of exactly 1 are right.
    settled = run.setting("optim.critic_warmup_steps", 0) + run.setting("schedule.max_staleness", 0) + 1
    if row.get("step", 0) <= settled or not row.get("staleness/mean", 0) > 0 or row.get("ratio/log_abs_max") != 0:
        return ""
    return (
        "Every ratio of the last step is exactly 1 although its tokens are stale: the logged log-probs look recomputed "
        "by the trainer, which turns every correction off."
    )


def _drift(run: RunData) -> str:
    drift = _late_mean(run, "drift/m")
    if drift is None or drift <= ROUNDING_DRIFT:
        return ""
    return (
        f"The mean log of the capped ratio is positive ({drift:.2g}); that takes a mismatch between engine and trainer."
    )


def _window(run: RunData) -> str:
    mean, largest = _late_mean(run, "window_weight/mean"), run.last("window_weight/max")
    if mean is not None and mean < LOW_WINDOW_WEIGHT:
        return f"The window weight is {mean:.1e} on average: the reward hardly reaches the target. Shorten the window."
    if largest is not None and largest > HIGH_WINDOW_WEIGHT:
        return f"The window weight reaches {largest:.3g}, which magnifies noise; shorten the window or lower c_clip."
    return ""


def _explained(run: RunData) -> str:
    explained = _late_mean(run, "value/explained_variance")
    if explained is None or explained >= 0 or len(run.training_rows) < CRITIC_GRACE_STEPS:
        return ""
    return (
        f"Explained variance is {explained:.2f} at the end: the critic is worse than a constant. Give it a higher "
        "learning rate or more warm-up steps."
    )


def _truncated(run: RunData) -> str:
    share = _late_mean(run, "response/truncated")
    if share is None or share <= MAX_TRUNCATED_SHARE:
        return ""
    return f"{share:.0%} of the responses are cut at the length limit; raise rollout.max_response_tokens."


def _no_signal(run: RunData) -> str:
    spread = _late_mean(run, "reward/std")
    if spread is None or spread > 0:
        return ""
    return "All rewards of the last steps are equal, so there is nothing to learn from."


def _restarts(run: RunData) -> str:
    restarts = run.last("backend/restarts")
    return f"Rollout processes were restarted {restarts:g} time(s)." if restarts else ""


def _no_change(run: RunData) -> str:
    found = run.evaluations()
    if len(found) < 2 or found[0].step > 0:
        return ""
    before, after = found[0].interval(), found[-1].interval()
    if before is None or after is None or before[1] < after[0] or after[1] < before[0]:
        return ""
    return "The intervals of success before and after overlap: the change may be chance."


def _identity(run: RunData) -> str:
    worst = max((abs(error) for error in identity_errors(run)), default=0.0)
    if worst <= MAX_IDENTITY_ERROR:
        return ""
    return f"Step time times throughput misses the tokens of a step by up to {worst:.1%}; one of the three is wrong."


def identity_errors(run: RunData) -> list[float]:
    """Per training step, ``time/step * throughput / tokens - 1``; steps that lack one of them are left out."""
    errors = []
    for row in run.training_rows:
        seconds, rate, tokens = (
            row.get(key, math.nan) for key in ("time/step", "throughput/tokens_per_s", "tokens/step")
        )
        if math.isfinite(seconds * rate * tokens) and tokens > 0:
            errors.append(seconds * rate / tokens - 1)
    return errors


_CHECKS: tuple[Callable[[RunData], str], ...] = (
    _status,
    _non_finite,
    _ledger,
    _bound,
    _identical,
    _mismatch,
    _ess,
    _drift,
    _window,
    _explained,
    _truncated,
    _dropped,
    _no_signal,
    _no_change,
    _restarts,
    _identity,
)
