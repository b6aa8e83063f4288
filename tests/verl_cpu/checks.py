"""Hold a case's dumped tensors against BRACE computed twice: by the package, and literally from the paper's sum."""

import json
import math
from pathlib import Path

import torch
from safetensors.torch import load_file

from brace_rl import core

WINDOW, RHO_CLIP, C_CLIP = 6, 1.2, 1.1
WINDOWS = {"window0": 0, "sync": WINDOW, "separate": WINDOW}
TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}
STEP_TOLERANCE = 1e-4
"""For runs of their own, whose sums are taken in another order."""


def literal_targets(values, rewards, behavior, target, mask, window):
    """Eq. 26 with gamma = lambda = 1, by its sums, in float64, one row at a time."""
    found = torch.zeros_like(values, dtype=torch.float64)
    for row in range(len(values)):
        at = mask[row].nonzero().flatten().tolist()
        v = [float(values[row, t]) for t in at] + [0.0]
        r = [0.0] * len(at)
        for t, reward in enumerate(rewards[row].tolist()):
            if reward:
                r[max(i for i, action in enumerate(at) if action <= t)] += reward
        w = [math.exp(float(target[row, t]) - float(behavior[row, t])) for t in at]
        for s in range(len(at)):
            j = min(s + window, len(at) - 1)
            trace, total = 1.0, v[s]
            for t in range(s, j):
                total += trace * min(RHO_CLIP, w[t]) * (r[t] + v[t + 1] - v[t])
                trace *= min(C_CLIP, w[t])
            found[row, at[s]] = total + trace * (sum(r[j:]) - v[j])
    return found


def dumps(case: Path):
    """The updates of a run, in order."""
    return [load_file(path) for path in sorted((case / "dump").glob("*.safetensors"))]


def check(name, out: Path, *, steps):
    """Figures of a run; fails where a stored target is not what BRACE says."""
    updates = dumps(out / name)
    logged = metrics(out / name)
    assert [int(x) for x in logged] == list(range(1, steps + 1)), sorted(logged)
    assert len(updates) >= steps
    worst, ratios, rejected, stale = 0.0, [], 0, 0
    for update in updates:
        action = update["action_mask"].bool()
        log_ratio = (update["old_log_probs"] - update["rollout_log_probs"])[action]
        ratios.append(float(log_ratio.abs().max()))
        rejected += int((action & ~update["response_mask"].bool()).sum())
        stale += int((update["versions"][:, 0] < update["step"][0] - 1).sum())
        if name not in WINDOWS:
            continue
        tensors = {key: update[key] for key in ("values",)}
        ours = core.brace_targets(
            **tensors,
            rewards=update["rm_scores"],
            behavior_logprobs=update["rollout_log_probs"],
            target_logprobs=update["old_log_probs"],
            policy_mask=action,
            window=WINDOWS[name],
        )
        torch.testing.assert_close(update["returns"], ours.targets, **TOLERANCE)
        literal = literal_targets(
            update["values"],
            update["rm_scores"],
            update["rollout_log_probs"],
            update["old_log_probs"],
            action,
            WINDOWS[name],
        )
        torch.testing.assert_close(update["returns"].double(), literal, rtol=1e-4, atol=1e-5)
        worst = max(worst, float((update["returns"].double() - literal).abs().max()))
    if name == "sync":
        assert rejected > 0, "the case means to show that rejection changes no target, and rejected nothing"
    if name == "separate":
        assert stale > 0, "the case means to be asynchronous, and no response was stale"
    scores = [figures["critic/score/mean"] for figures in logged.values()]
    return {
        "updates": len(updates),
        "largest |log w|": max(ratios),
        "tokens rejected": rejected,
        "stale responses": stale,
        "largest |stored - literal target|": worst,
        "score of first and last step": [round(scores[0], 4), round(scores[-1], 4)],
        "seconds per step": [round(figures["timing_s/step"], 1) for figures in logged.values()],
    }


def compare(one: Path, other: Path, *, steps):
    """Largest difference between two runs that should be the same, step for step; fails where there is one."""
    worst = {}
    for ours, theirs in zip(dumps(one), dumps(other), strict=True):
        # Rows come as they were finished.
        orders = [
            sorted(range(len(x["responses"])), key=lambda row, x=x: (x["responses"][row].tolist(), row))
            for x in (ours, theirs)
        ]
        mask = ours["action_mask"].bool()[orders[0]]
        assert torch.equal(ours["responses"][orders[0]], theirs["responses"][orders[1]])
        for key in ("returns", "advantages", "values", "old_log_probs"):
            gap = (ours[key][orders[0]] - theirs[key][orders[1]])[mask].abs().max()
            worst[key] = max(worst.get(key, 0.0), float(gap))
    for key in ("actor/pg_loss", "actor/grad_norm", "critic/vf_loss", "critic/grad_norm"):
        pairs = zip(metrics(one).values(), metrics(other).values(), strict=True)
        worst[key] = max(abs(a[key] - b[key]) / max(1.0, abs(a[key])) for a, b in pairs)
    assert len(metrics(one)) == steps
    assert max(worst.values()) < STEP_TOLERANCE, worst
    return worst


def metrics(case: Path):
    """What verl logged, by step."""
    lines = [json.loads(line) for line in (case / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["data"] for line in lines}
