"""Every finding has a file that triggers it; a clean file triggers none."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from rollout_rows import CURRENT, Row, clean_rows, policy_indices, write_rows

from brace_rl.diagnose.advice import verdict
from brace_rl.diagnose.columns import parse_maps
from brace_rl.diagnose.diagnosis import Diagnosis, diagnose
from brace_rl.diagnose.findings import CHECKS
from brace_rl.diagnose.settings import Settings
from brace_rl.diagnose.sums import Estimate

CLEAN = clean_rows()


def diagnosis_of(path, rows: list[Row], **settings) -> Diagnosis:
    return diagnose([write_rows(path, rows)], names=parse_maps([]), settings=Settings(**settings))


def changed(change: Callable[[Row], object], rows: list[Row] | None = None) -> list[Row]:
    """Copies of the rows with ``change`` applied to each."""
    copies = []
    for row in CLEAN if rows is None else rows:
        copy = {name: list(x) if isinstance(x, list) else x for name, x in row.items()}
        change(copy)
        copies.append(copy)
    return copies


def recompute_mu(row: Row) -> None:
    row["behavior_logprobs"] = list(row["target_logprobs"])


def recompute_most_of_mu(row: Row) -> None:
    """By another kernel, and not at the first token."""
    at = policy_indices(row)
    row["behavior_logprobs"] = [
        x if i == at[0] or x is None else pi + 1e-6 * (-1) ** i
        for i, (x, pi) in enumerate(zip(row["behavior_logprobs"], row["target_logprobs"], strict=True))
    ]


def renormalise_mu(row: Row) -> None:
    """Every sampled token had 5 % of pi's mass cut away beside it."""
    row["behavior_logprobs"] = [x - math.log(0.95) for x in row["behavior_logprobs"]]


def exaggerate_pi(row: Row) -> None:
    row["target_logprobs"] = [x + 0.02 if x < -0.05 else x for x in row["target_logprobs"]]


def exaggerate_all(row: Row) -> None:
    """By a factor that overflows over a long window."""
    row["target_logprobs"] = [x + 0.05 for x in row["target_logprobs"]]


def blur_engine(row: Row) -> None:
    """Alternating errors whose mean ratio stays 1."""
    for n, i in enumerate(policy_indices(row)):
        row["behavior_logprobs"][i] -= math.log1p(0.2 if n % 2 else -0.2)


def blur_record(row: Row) -> None:
    """The engine samples honestly and its record is off by 12 % to either side: the mean ratio is cosh(0.12)."""
    for n, i in enumerate(policy_indices(row)):
        row["behavior_logprobs"][i] += 0.12 if n % 2 else -0.12


def recompute_mu_of_half(row: Row) -> None:
    if int(row["prompt_id"][1:]) % 2:
        recompute_mu(row)


def stand_still(row: Row) -> None:
    """No update between, and an engine that differs by rounding."""
    row["behavior_logprobs"] = [x + 1e-7 * (-1) ** i for i, x in enumerate(row["target_logprobs"])]


def zero_some_of_mu(row: Row) -> None:
    """One token in seventeen."""
    for i in policy_indices(row)[3::17]:
        row["behavior_logprobs"][i] = 0.0


def reward_successes_on_prompt(row: Row) -> None:
    """The first token belongs to the prompt, and holds the reward, which only some responses earn."""
    row["policy_mask"][0] = False
    row["rewards"] = [float(row["prompt_id"].endswith("3"))] + [0.0] * (len(row["rewards"]) - 1)


def make_nan(row: Row) -> None:
    if row["prompt_id"] == "p3":
        row["values"][policy_indices(row)[2]] = math.nan


def force_end_of_sequence(row: Row) -> None:
    last = policy_indices(row)[-1]
    row["behavior_logprobs"][last], row["target_logprobs"][last] = 0.0, -2.0


def zero_block(row: Row) -> None:
    del row["target_logprobs"]
    row["behavior_logprobs"] = [0.0] * 200
    for name in ("values", "rewards", "policy_mask", "token_ids", "versions"):
        row[name] = (row[name] * 20)[:200]
    row["rewards"] = [0.0] * 199 + [1.0]
    row["policy_mask"] = [True] * 200
    row["values"] = [0.5] * 200
    row["versions"] = [CURRENT] * 200


def never_sampled(row: Row) -> None:
    row["behavior_logprobs"][policy_indices(row)[0]] = -9999.0


def impossible_logprob(row: Row) -> None:
    row["behavior_logprobs"][policy_indices(row)[0]] = 1.0


def move_reward_to_tool(row: Row) -> None:
    tool = row["policy_mask"].index(False)
    row["rewards"][tool], row["rewards"][-1] = row["rewards"][-1], 0.0


def reward_on_prompt(row: Row) -> None:
    row["policy_mask"][0] = False
    row["rewards"][0] = 1.0


def shift_values_after(row: Row) -> None:
    at = policy_indices(row)
    moved = [row["values"][i] for i in at[1:]] + [0.0]
    for i, value in zip(at, moved, strict=True):
        row["values"][i] = value


def shift_values_before(row: Row) -> None:
    at = policy_indices(row)
    moved = [row["values"][at[0]]] + [row["values"][i] for i in at[:-1]]
    for i, value in zip(at, moved, strict=True):
        row["values"][i] = value


def part_at_once(change: Callable[[Row], object]) -> Callable[[Row], None]:
    """No two responses share a token."""

    def both(row: Row) -> None:
        change(row)
        row["token_ids"][0] = -3 - row["token_ids"][1] - row["token_ids"][2]

    return both


def no_prompts(change: Callable[[Row], object]) -> Callable[[Row], None]:
    def both(row: Row) -> None:
        change(row)
        del row["prompt_id"]

    return both


def stamp_version(row: Row) -> None:
    """As an engine does that tags a response with the version it began with."""
    row["versions"] = row["versions"][0]


def version_from_the_future(row: Row) -> None:
    row["current_version"] = CURRENT - 2


def cut_off(row: Row) -> None:
    row["truncated"] = row["prompt_id"] in ("p1", "p2", "p3")


def cut_to_forty_unsaid(row: Row) -> None:
    cut_to_forty(row)
    del row["truncated"]


def cut_to_forty(row: Row) -> None:
    for name in ("behavior_logprobs", "target_logprobs", "values", "policy_mask", "rewards", "token_ids", "versions"):
        row[name] = row[name][:40]


def bootstrap_everywhere(row: Row) -> None:
    row["bootstrap"] = 0.5


def reward_one(row: Row) -> None:
    row["rewards"] = [0.0] * (len(row["rewards"]) - 1) + [1.0]


def negate_values(row: Row) -> None:
    row["values"] = [None if x is None else -2 * x for x in row["values"]]


def blow_up_one_token(row: Row) -> None:
    """One token of three hundred has a ratio of 150, which is impossible to come by honestly, but is logged."""
    if row["prompt_id"] in ("p1", "p2", "p3", "p4", "p5"):
        row["behavior_logprobs"][0] = row["target_logprobs"][0] - 5.0


def lower_every_other_pi(row: Row) -> None:
    """Too uneven to be a factor."""
    row["target_logprobs"] = [x - 2.0 * (i % 2) for i, x in enumerate(row["target_logprobs"])]


WIDE = clean_rows(gain=2.5, noise=0.4)

TRIGGERS: list[tuple[str, str, list[Row], dict[str, float]]] = [
    ("mu_equals_pi", "error", changed(recompute_mu), {}),
    ("mu_equals_pi", "warning", changed(recompute_most_of_mu), {}),
    ("mu_equals_pi", "warning", changed(recompute_mu_of_half), {}),
    ("mu_equals_pi", "warning", changed(stand_still), {}),
    ("systematic_factor", "error", changed(renormalise_mu), {}),
    ("systematic_factor", "warning", changed(blur_record), {}),
    ("positive_drift", "error", changed(exaggerate_pi), {}),
    ("engine_mismatch", "warning", changed(blur_engine), {}),
    ("not_finite", "error", changed(make_nan), {}),
    ("placeholder_logprobs", "error", changed(force_end_of_sequence), {}),
    ("placeholder_logprobs", "error", changed(zero_block), {}),
    ("placeholder_logprobs", "error", changed(zero_some_of_mu), {}),
    ("placeholder_logprobs", "error", changed(never_sampled), {}),
    ("positive_logprobs", "error", changed(impossible_logprob), {}),
    ("reward_on_non_policy_token", "warning", changed(move_reward_to_tool), {}),
    ("reward_before_policy", "error", changed(reward_on_prompt), {}),
    ("reward_before_policy", "error", changed(reward_successes_on_prompt), {}),
    ("values_shifted", "error", changed(shift_values_after), {}),
    ("values_shifted", "error", changed(shift_values_before), {}),
    ("values_shifted", "warning", changed(part_at_once(shift_values_after)), {}),
    ("values_shifted", "warning", changed(no_prompts(shift_values_after)), {}),
    ("values_shifted", "warning", changed(no_prompts(shift_values_before)), {}),
    ("version_per_response", "warning", changed(stamp_version, clean_rows(prompts=200, noise=0.1)), {}),
    ("version_ahead", "error", changed(version_from_the_future), {}),
    ("truncation_as_termination", "warning", changed(cut_off), {}),
    ("truncation_as_termination", "note", changed(cut_to_forty), {}),
    ("truncation_as_termination", "note", changed(cut_to_forty_unsaid), {}),
    ("bootstrap_on_ended", "error", changed(bootstrap_everywhere), {}),
    ("critic_stale", "warning", clean_rows(gain=1.0), {}),
    ("poor_critic", "warning", changed(negate_values), {}),
    ("lambda_with_long_window", "warning", CLEAN, {"lam": 0.95}),
    ("extreme_window_weights", "warning", changed(lower_every_other_pi), {}),
    ("low_ess", "warning", changed(blow_up_one_token), {}),
    ("low_response_ess", "note", WIDE, {}),
    ("constant_reward", "warning", changed(reward_one), {}),
    ("too_few_rows", "note", CLEAN[:12], {}),
    ("positive_drift", "note", changed(exaggerate_pi, CLEAN[:12]), {}),
    ("systematic_factor", "note", changed(renormalise_mu, CLEAN[:12]), {}),
    ("systematic_factor", "error", changed(exaggerate_all), {"window": 16384}),
]


@pytest.mark.parametrize(
    ("name", "severity", "rows", "settings"), TRIGGERS, ids=[f"{name}-{i}" for i, (name, *_) in enumerate(TRIGGERS)]
)
def test_a_fault_is_found(tmp_path, name, severity, rows, settings):
    found = {finding.name: finding for finding in diagnosis_of(tmp_path / "r.jsonl", rows, **settings).findings}
    assert name in found
    assert found[name].severity == severity
    assert any(character.isdigit() for character in found[name].evidence)
    assert found[name].mend


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_clean_file_has_no_findings(tmp_path, seed):
    found = diagnosis_of(tmp_path / "r.jsonl", clean_rows(seed=seed)).findings
    assert [finding.name for finding in found] == []


def test_every_check_has_a_file_that_triggers_it():
    assert {check.__name__ for check in CHECKS} == {name for name, *_ in TRIGGERS} | {"temperature"}


def rows_of_temperature(sampled_at: float, noise: float = 0.0) -> list[Row]:
    """Tokens drawn at a temperature, recorded with noise, and scored at temperature 1 by the same weights."""
    rng = np.random.default_rng(0)
    rows = []
    for n in range(200):
        row = {"behavior_logprobs": [], "target_logprobs": [], "versions": 5, "current_version": 5, "reward": 1.0}
        for _ in range(40):
            z = rng.normal(0, 2.0, 8)
            pi = z - np.log(np.exp(z).sum())
            mu = z / sampled_at - np.log(np.exp(z / sampled_at).sum())
            token = rng.choice(8, p=np.exp(mu))
            row["behavior_logprobs"].append(mu[token] + noise * rng.normal())
            row["target_logprobs"].append(pi[token])
        rows.append(row | {"prompt_id": n})
    return rows


@pytest.mark.parametrize("sampled_at", [0.7, 1.3])
def test_a_temperature_is_found_and_read_off_and_nothing_else_is_blamed(tmp_path, sampled_at):
    """Where mu is pi at another temperature, log pi = T log mu + const."""
    rows = rows_of_temperature(sampled_at)
    found = {finding.name: finding for finding in diagnosis_of(tmp_path / "r.jsonl", rows).findings}
    assert found["temperature"].severity == "error"
    assert found["temperature"].numbers["slope"] == pytest.approx(sampled_at, rel=0.3)
    assert {"systematic_factor", "engine_mismatch"} & found.keys() == set()
    assert "engine_mismatch" in found["temperature"].mend


def test_noise_in_the_record_is_no_temperature_and_no_error(tmp_path):
    """Noise in what a slope is taken against lowers it, as a temperature would, but lowers the other slope too."""
    found = diagnosis_of(tmp_path / "r.jsonl", rows_of_temperature(1.0, noise=0.3)).findings
    assert [(f.name, f.severity) for f in found[:2]] == [
        ("engine_mismatch", "warning"),
        ("systematic_factor", "warning"),
    ]
    assert "temperature" not in {f.name for f in found}
    assert "error" not in {f.severity for f in found}


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (zero_some_of_mu, "placeholder_logprobs"),
        (renormalise_mu, "systematic_factor"),
        (recompute_mu_of_half, "mu_equals_pi"),
        (stand_still, "mu_equals_pi"),
        (reward_successes_on_prompt, "reward_before_policy"),
        (shift_values_after, "values_shifted"),
    ],
)
def test_a_fault_leaves_no_verdict_and_is_blamed_alone(tmp_path, change, fault):
    found = diagnosis_of(tmp_path / "r.jsonl", changed(change))
    assert [f.name for f in found.findings if f.severity != "note"] == [fault]
    assert found.verdict.state == "cannot tell"
    assert fault in found.verdict.sentence
    is_of_ratios = fault not in ("reward_before_policy", "values_shifted")
    assert all((advice.value is None) == is_of_ratios for advice in found.recommendations)


def test_what_a_fault_explains_is_held_back_and_named_by_it(tmp_path):
    found = {f.name: f for f in diagnosis_of(tmp_path / "r.jsonl", changed(zero_some_of_mu)).findings}
    assert "systematic_factor" not in found
    assert "systematic_factor" in found["placeholder_logprobs"].mend


def test_equal_tokens_all_over_are_digits_and_no_copy(tmp_path):
    """Few digits and small updates make many ratios exactly 1, in every response."""

    def round_both(row: Row) -> None:
        for name in ("behavior_logprobs", "target_logprobs"):
            row[name] = [None if x is None or math.isnan(x) else round(x, 1) for x in row[name]]

    counts = diagnosis_of(tmp_path / "r.jsonl", changed(round_both))
    assert counts.statistics.counts.equal_elsewhere > 0.3 * counts.statistics.counts.unsure_elsewhere
    assert "mu_equals_pi" not in {f.name for f in counts.findings}


def test_one_reward_for_all_leaves_no_verdict(tmp_path):
    found = diagnosis_of(tmp_path / "r.jsonl", changed(reward_one)).verdict
    assert (found.state, "same reward" in found.sentence) == ("cannot tell", True)


def test_a_bias_short_of_three_standard_errors_is_neither_proven_nor_denied(tmp_path):
    stats = diagnosis_of(tmp_path / "r.jsonl", CLEAN).statistics
    for bias, state in (
        (Estimate(0.14, -0.01, 0.23), "no sign"),
        (Estimate(0.14, 0.03, 0.23), "cannot tell"),
        (Estimate(0.14, 0.08, 0.23), "stale"),
    ):
        seen = replace(
            stats,
            shift=None,
            ratio=replace(stats.ratio, response_ess=100.0),
            reward=replace(stats.reward, bias=bias, sigma=1.0),
        )
        assert verdict(seen).state == state


def test_a_lambda_that_leaves_most_of_the_weight_is_no_finding(tmp_path):
    found = diagnosis_of(tmp_path / "r.jsonl", CLEAN, lam=0.999, window=100).findings
    assert "lambda_with_long_window" not in {f.name for f in found}


def test_a_factor_near_one_is_told_by_its_distance_from_one(tmp_path):
    def add_little(row: Row) -> None:
        row["target_logprobs"] = [x + 0.003 for x in row["target_logprobs"]]

    found = {f.name: f for f in diagnosis_of(tmp_path / "r.jsonl", changed(add_little)).findings}
    assert "less 1, is 0.00299 [" in found["systematic_factor"].evidence


def test_all_of_lag_zero_and_identical_is_a_note(tmp_path):
    def fresh(row):
        recompute_mu(row)
        row["versions"] = [CURRENT if v >= 0 else v for v in row["versions"]]

    found = {finding.name: finding for finding in diagnosis_of(tmp_path / "r.jsonl", changed(fresh)).findings}
    assert found["mu_equals_pi"].severity == "note"


def test_rows_that_cannot_be_used_are_why_nothing_can_be_told(tmp_path):
    def unmask(row: Row) -> None:
        row["policy_mask"] = [False] * len(row["policy_mask"])

    found = diagnosis_of(tmp_path / "rows.jsonl", changed(unmask, CLEAN[:5]))
    assert found.verdict.sentence.startswith("None of the 5 responses can be used: 5 have no policy token")


def test_critics_that_differ_on_shared_tokens_are_no_shift(tmp_path):
    """Rows of two trainer steps that do not say so: V of one prompt differs, before the responses part as after."""
    steps = iter(range(10**6))

    def move_critic(row: Row) -> None:
        row["values"] = [x + 3.0 * (next_step % 2) for next_step in [next(steps)] for x in row["values"]]

    found = diagnosis_of(tmp_path / "rows.jsonl", changed(move_critic)).findings
    assert "values_shifted" not in {f.name for f in found}


def test_few_shared_tokens_at_which_critics_differ_are_no_shift(tmp_path):
    """Rows of two trainer steps again, of which only one prompt's share a token before they part."""
    steps = iter(range(10**6))

    def move_critic(row: Row) -> None:
        if row["prompt_id"] != "p7":
            row["token_ids"][0] = -3 - row["token_ids"][1] - row["token_ids"][2]
        up = 3.0 * (next(steps) % 2)
        row["values"] = [x + up for x in row["values"]]

    found = diagnosis_of(tmp_path / "rows.jsonl", changed(move_critic)).findings
    assert "values_shifted" not in {f.name for f in found}


def test_the_direction_of_a_shift_is_told(tmp_path):
    after = diagnosis_of(tmp_path / "a.jsonl", changed(shift_values_after)).findings
    before = diagnosis_of(tmp_path / "b.jsonl", changed(shift_values_before)).findings
    shifts = [next(f for f in found if f.name == "values_shifted").numbers["shift"] for found in (after, before)]
    assert shifts == [1, -1]


def test_findings_come_worst_first(tmp_path):
    rows = changed(lambda row: (cut_off(row), recompute_mu(row)))[:12]
    severities = [finding.severity for finding in diagnosis_of(tmp_path / "r.jsonl", rows, lam=0.9).findings]
    assert severities == sorted(severities, key=["error", "warning", "note"].index)
    assert set(severities) == {"error", "warning", "note"}
