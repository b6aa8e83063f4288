"""Adds responses up, a chunk at a time; what it holds does not grow with the files."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from brace_rl import core
from brace_rl.diagnose import measures
from brace_rl.diagnose.chunk import Chunk, collate
from brace_rl.diagnose.response import NO_VERSION, Bools, Floats, Response
from brace_rl.diagnose.settings import Settings
from brace_rl.diagnose.siblings import Siblings
from brace_rl.diagnose.sums import Sums, cluster_weights

SURE = math.log(0.9)
"""Where one side says exactly 0 (certain), the other must not be below this, or the 0 is no log-prob."""
MAX_LOGPROB = 1e-3
"""Largest positive log-prob that passes for rounding."""
MIN_LOGPROB = -100.0
"""Nothing that improbable is ever sampled: a lower number stands for something else."""
ZERO_RUN = 64
"""Exact zeros in a row that count as a block, where there is no other side to compare with."""
MIN_HALVES = 8
"""Policy tokens a response needs before its versions say anything about straddling an update, or its ratios of mu."""
MANY = 100_000
"""Prompts and versions are told apart up to this many."""
UNMOVED = 1e-5
"""Difference of two log-probs that is rounding and no update."""

HISTOGRAM_LIMIT = 2.0
HISTOGRAM_LINEAR = 1e-3
HISTOGRAM_BINS = 200
"""Bins of log w from minus to plus the limit, even in ``asinh(log w / linear)``: fine around 0, where rounding shows,
and wide far out; one more on either side for what lies beyond."""


@dataclass
class Counts:
    """What is counted rather than summed; tokens are policy tokens.

    Attributes:
        rows, rows_empty, rows_not_finite, rows_unearned: all rows; those without policy tokens; with NaN or infinity at
            a policy token; with a reward before the first policy token. Only the rest is used.
        not_finite: entries by column.
        positive, impossible: log-probs above 0; below anything that is ever sampled.
        false_zeros: exact zeros in one log-prob that the other contradicts, by column; ``false_zeros_last``: those of
            ``behavior_logprobs`` at the last policy token.
        zero_blocks: tokens in long runs of exact zeros, counted where there is nothing to compare with.
        compared, identical, identical_stale: tokens with both log-probs; those where they are equal; equal and stale.
        unsure_stale, unmoved_stale: stale tokens of which pi was not certain; those where both log-probs are as good as
            equal.
        rows_stale, rows_unmoved: responses with at least :data:`MIN_HALVES` such tokens; those where both log-probs are
            exactly equal at every one of them.
        equal_elsewhere, unsure_elsewhere: in the rest of them, such tokens with exactly equal log-probs, and all.
        fresh, stale, early: tokens of lag 0, above 0, below 0.
        reward_elsewhere: rows with a reward on a non-policy token.
        one_version, several_versions, stamped: responses long enough to tell, by the versions they carry; those with a
            single number for the whole response.
    """

    rows: int = 0
    rows_empty: int = 0
    rows_not_finite: int = 0
    rows_unearned: int = 0
    tokens: int = 0
    not_finite: dict[str, int] = field(default_factory=dict)
    positive: int = 0
    impossible: int = 0
    false_zeros: dict[str, int] = field(default_factory=dict)
    false_zeros_last: int = 0
    zero_blocks: int = 0
    compared: int = 0
    identical: int = 0
    identical_stale: int = 0
    unsure_stale: int = 0
    unmoved_stale: int = 0
    rows_stale: int = 0
    rows_unmoved: int = 0
    equal_elsewhere: int = 0
    unsure_elsewhere: int = 0
    fresh: int = 0
    stale: int = 0
    early: int = 0
    reward_elsewhere: int = 0
    truncated: int = 0
    truncated_without_bootstrap: int = 0
    bootstrap_on_ended: int = 0
    one_version: int = 0
    several_versions: int = 0
    stamped: int = 0
    shortest: int = 0
    longest: int = 0
    at_longest: int = 0
    most_policy_tokens: int = 0

    @property
    def rows_used(self) -> int:
        """Rows that the figures are made of."""
        return self.rows - self.rows_empty - self.rows_not_finite - self.rows_unearned


def histogram_place(share: float) -> float:
    """log w at a share, 0 to 1, of the histogram's width."""
    return HISTOGRAM_LINEAR * math.sinh((2 * share - 1) * math.asinh(HISTOGRAM_LIMIT / HISTOGRAM_LINEAR))


class Collector:
    """Takes responses that all hold the same per-token columns."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.counts = Counts()
        self.sums = Sums()
        self.siblings = Siblings()
        self.columns: set[str] = set()
        self.prompts: set[int] = set()
        self.versions: set[int] = set()
        self.reward_range = (math.inf, -math.inf)
        self.largest_log_ratio = 0.0
        self.largest_weight: dict[str, float] = {}
        self.log_weight_shift = -math.inf
        self.histograms = np.zeros((len(measures.LAG_EDGES) + 1, HISTOGRAM_BINS + 2), dtype=np.int64)

    def add(self, responses: Sequence[Response]) -> None:
        """Count all of them, and add up those that can be used."""
        usable = [response for response in responses if self._count(response)]
        if not usable:
            return
        weights = cluster_weights([r.where if r.prompt_id is None else r.prompt_id for r in usable], self.settings.seed)
        chunk = collate(usable)
        self.sums.add(self._response_sums(chunk), weights)
        if chunk.log_ratios is not None:
            self.sums.add(self._ratio_sums(chunk), weights)
            self._fill_histograms(chunk)
        if chunk.values is not None and chunk.behavior_logprobs is not None:
            self.sums.add(measures.alignment_sums(chunk), weights)
        if chunk.values is not None and chunk.rewards is not None and chunk.log_ratios is not None:
            targets = measures.targets_of(chunk, self.settings)
            self.sums.add(measures.slope_sums(chunk, targets), weights)
        if chunk.values is not None and chunk.rewards is not None:
            returns = core.monte_carlo_targets(
                values=chunk.values,
                rewards=chunk.rewards,
                policy_mask=chunk.policy_mask,
                gamma=self.settings.gamma,
                bootstrap_values=chunk.bootstrap,
                check_inputs=False,
            ).targets
            self.sums.add(measures.value_sums(chunk, returns), weights)

    def _count(self, response: Response) -> bool:
        """Whether the response can be used."""
        counts, mask = self.counts, response.policy_mask
        counts.rows += 1
        self.columns |= response.columns
        self._count_lengths(response)
        if not mask.any():
            counts.rows_empty += 1
            return False
        finite = True
        for name, x in response.numbers.items():
            wrong = int((~np.isfinite(x[mask])).sum())
            if wrong:
                counts.not_finite[name] = counts.not_finite.get(name, 0) + wrong
                finite = False
        self._count_versions(response)
        self._count_logprobs(response)
        if response.rewards is not None:
            elsewhere = (response.rewards != 0) & ~mask
            counts.reward_elsewhere += int(elsewhere.any())
            if elsewhere[: int(np.argmax(mask))].any():
                counts.rows_unearned += 1
                return False
        if not finite:
            counts.rows_not_finite += 1
            return False
        counts.tokens += int(mask.sum())
        counts.truncated += response.truncated
        counts.truncated_without_bootstrap += response.truncated and response.bootstrap == 0
        counts.bootstrap_on_ended += not response.truncated and response.bootstrap != 0
        if response.prompt_id is not None and len(self.prompts) < MANY:
            self.prompts.add(hash(response.prompt_id))
        self.siblings.add(response)
        return True

    def _count_lengths(self, response: Response) -> None:
        counts, length = self.counts, len(response)
        counts.shortest = length if counts.rows == 1 else min(counts.shortest, length)
        if length > counts.longest:
            counts.longest, counts.at_longest = length, 0
        counts.at_longest += length == counts.longest
        counts.most_policy_tokens = max(counts.most_policy_tokens, int(response.policy_mask.sum()))

    def _count_versions(self, response: Response) -> None:
        if response.versions is None:
            return
        counts, known = self.counts, response.versions[response.policy_mask]
        known = known[known != NO_VERSION]
        if len(self.versions) < MANY:
            self.versions.update(np.unique(known).tolist())
        if len(known) >= MIN_HALVES:
            varies = bool((known != known[0]).any())
            counts.several_versions += varies
            counts.one_version += not varies
            counts.stamped += response.one_version
        if response.current_version is not None:
            lag = response.current_version - known
            counts.fresh += int((lag == 0).sum())
            counts.stale += int((lag > 0).sum())
            counts.early += int((lag < 0).sum())

    def _count_logprobs(self, response: Response) -> None:
        counts, mask = self.counts, response.policy_mask
        mu, pi = (None if x is None else x[mask] for x in (response.behavior_logprobs, response.target_logprobs))
        with np.errstate(invalid="ignore"):
            for x in (mu, pi):
                if x is not None:
                    counts.positive += int(((x > MAX_LOGPROB) & np.isfinite(x)).sum())
                    counts.impossible += int(((x < MIN_LOGPROB) & np.isfinite(x)).sum())
            if mu is not None and pi is not None:
                self._compare_logprobs(response, mu, pi)
            elif mu is not None or pi is not None:
                counts.zero_blocks += _in_runs(mu if mu is not None else pi)

    def _compare_logprobs(self, response: Response, mu: Floats, pi: Floats) -> None:
        counts = self.counts
        for name, one, other in (("behavior_logprobs", mu, pi), ("target_logprobs", pi, mu)):
            false = (one == 0) & (other < SURE)
            counts.false_zeros[name] = counts.false_zeros.get(name, 0) + int(false.sum())
            if name == "behavior_logprobs":
                counts.false_zeros_last += int(false[-1])
        identical = mu == pi
        counts.compared += len(mu)
        counts.identical += int(identical.sum())
        if response.versions is not None and response.current_version is not None:
            versions = response.versions[response.policy_mask]
            stale = (versions != NO_VERSION) & (versions < response.current_version)
            counts.identical_stale += int((identical & stale).sum())
            unsure = stale & (pi < SURE)
            counts.unsure_stale += int(unsure.sum())
            counts.unmoved_stale += int((unsure & (np.abs(mu - pi) < UNMOVED)).sum())
            self._count_unmoved(identical[unsure])

    def _count_unmoved(self, equal: Bools) -> None:
        """Of one response, the stale tokens of which pi was not certain."""
        counts = self.counts
        if len(equal) < MIN_HALVES:
            return
        counts.rows_stale += 1
        if equal.all():
            counts.rows_unmoved += 1
        else:
            counts.equal_elsewhere += int(equal.sum())
            counts.unsure_elsewhere += len(equal)

    def _ratio_sums(self, chunk: Chunk) -> measures.Columns:
        settings = self.settings
        weights = core.window_weights(
            behavior_logprobs=measures.known(chunk.behavior_logprobs),
            target_logprobs=measures.known(chunk.target_logprobs),
            policy_mask=chunk.policy_mask,
            window=settings.window,
            c_clip=settings.c_clip,
            gamma=settings.gamma,
            lam=settings.lam,
            check_inputs=False,
        )
        longest = int(chunk.after.max()) + 1
        for low, high in measures.horizon_bins(longest):
            inside = chunk.policy_mask & (chunk.after >= low)
            inside = inside if high is None else inside & (chunk.after < high)
            largest = float(torch.where(inside, weights, 0.0).max())
            self.largest_weight[f"h{low}"] = max(self.largest_weight.get(f"h{low}", 0.0), largest)
        sums = measures.ratio_sums(chunk, settings) | measures.lag_sums(chunk) | measures.weight_sums(chunk, weights)
        if bool((chunk.lags > 0).any()):
            sums |= measures.version_sums(chunk)
        return sums | self._importance_sums(chunk)

    def _importance_sums(self, chunk: Chunk) -> measures.Columns:
        """Whole-response weights ``prod w``, relative to the largest seen, so that none overflows."""
        log_weights = measures.known(chunk.log_ratios).sum(1).numpy()
        shift = max(self.log_weight_shift, float(log_weights.max()))
        if shift > self.log_weight_shift:
            factor = math.exp(self.log_weight_shift - shift)
            self.sums.scale(("is/w", "is/wr"), factor)
            self.sums.scale(("is/ww",), factor**2)
            self.log_weight_shift = shift
        weights = np.exp(log_weights - shift)
        sums = {"is/w": weights, "is/ww": weights**2}
        if chunk.rewards is not None:
            sums["is/wr"] = weights * chunk.rewards.sum(1).numpy()
        return sums

    def _response_sums(self, chunk: Chunk) -> measures.Columns:
        ones = np.ones(len(chunk.responses))
        mask = chunk.policy_mask
        sums = {"response/n": ones, "response/tokens": mask.sum(1).double().numpy()}
        if chunk.behavior_logprobs is not None:
            sums["response/surprise"] = -chunk.behavior_logprobs.sum(1).numpy()
        truncated = np.array([r.truncated for r in chunk.responses], dtype=np.float64)
        sums["truncated/n"] = truncated
        if chunk.rewards is not None:
            rewards = chunk.rewards.sum(1).numpy()
            low, high = self.reward_range
            self.reward_range = (min(low, float(rewards.min())), max(high, float(rewards.max())))
            sums |= {"response/r": rewards, "response/rr": rewards**2, "truncated/r": truncated * rewards}
        if chunk.values is not None:
            is_first = mask & (mask.cumsum(1) == 1)
            sums["response/first"] = torch.where(is_first, chunk.values, 0.0).sum(1).numpy()
            last = torch.where(mask & (chunk.after == 0), chunk.values, 0.0).sum(1).numpy()
            sums |= {"response/last": last, "truncated/last": truncated * last}
        return sums

    def _fill_histograms(self, chunk: Chunk) -> None:
        """Row 0 is of all tokens, row g + 1 of lag group g."""
        mask = chunk.policy_mask
        log_ratios = measures.known(chunk.log_ratios)[mask]
        self.largest_log_ratio = max(self.largest_log_ratio, float(log_ratios.abs().max()))
        place = (log_ratios / HISTOGRAM_LINEAR).asinh() / math.asinh(HISTOGRAM_LIMIT / HISTOGRAM_LINEAR)
        index = ((place + 1) / 2 * HISTOGRAM_BINS).floor().clamp(-1, HISTOGRAM_BINS).long() + 1
        groups = measures.lag_group(chunk.lags)[mask]
        width = HISTOGRAM_BINS + 2
        self.histograms[0] += torch.bincount(index, minlength=width).numpy()
        known = groups >= 0
        by_group = torch.bincount(groups[known] * width + index[known], minlength=len(measures.LAG_EDGES) * width)
        self.histograms[1:] += by_group.view(-1, width).numpy()


def _in_runs(x: Floats | None) -> int:
    """Entries in runs of at least :data:`ZERO_RUN` exact zeros."""
    if x is None or len(x) < ZERO_RUN:
        return 0
    edges = np.flatnonzero(np.diff(np.concatenate(([0], x == 0, [0])).astype(np.int8)))
    lengths = edges[1::2] - edges[::2]
    return int(lengths[lengths >= ZERO_RUN].sum())
