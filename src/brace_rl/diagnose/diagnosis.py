"""Files in, diagnosis out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from brace_rl.diagnose.advice import Recommendation, Verdict, recommendations, verdict
from brace_rl.diagnose.collect import HISTOGRAM_BINS, Collector, histogram_place
from brace_rl.diagnose.columns import ColumnMap
from brace_rl.diagnose.finding import Finding
from brace_rl.diagnose.findings import findings
from brace_rl.diagnose.reader import check_same_columns, chunks, read_responses
from brace_rl.diagnose.response import Response
from brace_rl.diagnose.settings import Settings
from brace_rl.diagnose.statistics import EXPECTATION, Statistics, statistics_of

FORMAT_VERSION = 1
"""Of ``diagnosis.json``."""

_RATIOS = ("behavior_logprobs", "target_logprobs")
NEEDS: Sequence[tuple[str, tuple[str, ...]]] = (
    ("ratios, ESS, drift, window weights, recommended settings", _RATIOS),
    ("ratios by version lag, engine mismatch apart from staleness", (*_RATIOS, "versions", "current_version")),
    ("E_pi[R], b_hat", (*_RATIOS, "reward")),
    ("explained variance, value error", ("values", "reward")),
    ("beta and BRACE shift by horizon, g_hat", (*_RATIOS, "values", "reward")),
    ("alignment of values by surprise", ("values", "behavior_logprobs")),
    ("alignment of values among responses to a prompt", ("values", "prompt_id", "token_ids")),
    ("intervals by prompt rather than by response", ("prompt_id",)),
    ("truncation kept apart from termination", ("truncated",)),
    ("tool output kept apart (all tokens count as policy tokens)", ("policy_mask",)),
)
"""(figure, columns it needs); ``reward`` stands for either kind."""


@dataclass(frozen=True)
class Missing:
    """A figure that the files cannot give, and the columns that would."""

    figure: str
    columns: tuple[str, ...]


@dataclass(frozen=True)
class Diagnosis:
    """All that is shown and written."""

    files: tuple[str, ...]
    statistics: Statistics
    verdict: Verdict
    findings: tuple[Finding, ...]
    recommendations: tuple[Recommendation, ...]
    missing: tuple[Missing, ...]

    def to_dict(self) -> dict[str, Any]:
        """For ``diagnosis.json``; NaN is left to the writer."""
        content = _plain(asdict(self))
        return {
            "format": FORMAT_VERSION,
            "expectation_under_pi": EXPECTATION,
            "rows_used": self.statistics.counts.rows_used,
            # Bin i + 1 of a histogram lies between edges i and i + 1; the first and the last bin hold what lies beyond.
            "histogram_edges": [histogram_place(i / HISTOGRAM_BINS) for i in range(HISTOGRAM_BINS + 1)],
            **content,
        }


def diagnose(
    files: Sequence[Path],
    *,
    names: ColumnMap,
    settings: Settings,
    progress: Callable[[Path, int], None] = lambda path, read: None,
) -> Diagnosis:
    """Read all files once, in bounded memory.

    Args:
        files: as :func:`~brace_rl.diagnose.reader.rollout_files` gives them.
        progress: told the file and how many of its bytes have been read.

    Raises:
        DataError: names the file, the row, the column and what was expected.
    """
    collector = Collector(settings)
    for chunk in chunks(_all_responses(files, names, progress)):
        collector.add(chunk)
    stats = statistics_of(collector)
    found = findings(stats)
    return Diagnosis(
        files=tuple(str(path) for path in files),
        statistics=stats,
        verdict=verdict(stats, found),
        findings=found,
        recommendations=recommendations(stats, found),
        missing=missing_figures(stats.columns),
    )


def missing_figures(columns: Iterable[str]) -> tuple[Missing, ...]:
    """What cannot be computed from these columns, and why."""
    have = set(columns)
    if "rewards" in have:
        have.add("reward")
    lacking = [(figure, tuple(name for name in needed if name not in have)) for figure, needed in NEEDS]
    return tuple(Missing(figure, absent) for figure, absent in lacking if absent)


def _all_responses(
    files: Sequence[Path], names: ColumnMap, progress: Callable[[Path, int], None]
) -> Iterator[Response]:
    first: Response | None = None
    for path in files:
        for response in read_responses(path, names, partial(progress, path)):
            if first is None:
                first = response
            check_same_columns(response, first, names)
            yield response


def _plain(obj: Any) -> Any:
    """Keys as text, sets as sorted lists."""
    if isinstance(obj, dict):
        return {str(key): _plain(value) for key, value in obj.items()}
    if isinstance(obj, frozenset | set):
        return sorted(obj)
    if isinstance(obj, list | tuple):
        return [_plain(item) for item in obj]
    return obj
