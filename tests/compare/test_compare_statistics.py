"""Intervals against every resample written out, the area against geometry, the mark against its definition."""

import math
import random
from itertools import product
from statistics import NormalDist, fmean

import pytest

from brace_rl.compare.statistics import area, best, leader, mean_over_seeds, paired_difference, student_low


def every_resample(values):
    return sorted(fmean(drawn) for drawn in product(values, repeat=len(values)))


def test_an_interval_is_that_of_all_resamples_at_students_percentiles():
    values = [0.1, 0.35, 0.4, 0.42, 0.6]
    student = 2.776  # t for 4 degrees of freedom, two-sided 95 %
    tail = NormalDist().cdf(-math.sqrt(5 / 4) * student)
    means = every_resample(values)
    estimate = mean_over_seeds(values)
    assert estimate.value == pytest.approx(fmean(values))
    # 5 ** 5 resamples: the percentile lies within a few places of the one drawn at random.
    place = tail * len(means)
    assert means[0] <= estimate.low <= means[round(place) + 8]
    assert means[-1 - round(place) - 8] <= estimate.high <= means[-1]


def test_many_seeds_have_the_interval_of_the_normal():
    values = [i / 100 for i in range(100)]
    spread = math.sqrt(sum((x - fmean(values)) ** 2 for x in values) / 99)
    estimate = mean_over_seeds(values)
    assert estimate.high - estimate.low == pytest.approx(2 * 1.984 * spread / 10, rel=0.03)


@pytest.mark.parametrize("count", [2, 3, 4])
def test_few_seeds_have_their_whole_range(count):
    values = [0.2, 0.9, 0.5, 0.3][:count]
    estimate = mean_over_seeds(values)
    assert (estimate.low, estimate.high) == pytest.approx((min(values), max(values)))


def test_one_seed_has_no_interval():
    estimate = mean_over_seeds([0.5])
    assert estimate.value == 0.5
    assert math.isnan(estimate.low)
    assert math.isnan(estimate.high)


def test_no_seed_is_an_error():
    with pytest.raises(ValueError, match="one figure per seed"):
        mean_over_seeds([])


def test_pairs_are_the_seeds_both_have():
    difference = paired_difference({0: 0.5, 1: 0.75, 2: 0.9}, {1: 0.25, 2: 0.5, 3: 0.0})
    assert difference.value == pytest.approx((0.5 + 0.4) / 2)
    assert (difference.low, difference.high) == pytest.approx((0.4, 0.5))
    assert paired_difference({0: 1.0}, {1: 1.0}) is None


def test_pairing_marks_what_unpaired_intervals_would_hide():
    a = {seed: 0.1 * seed + 0.02 for seed in range(5)}
    b = {seed: 0.1 * seed for seed in range(5)}
    assert mean_over_seeds(list(a.values())).low < mean_over_seeds(list(b.values())).high
    assert best({"a": a, "b": b}) == "a"


def test_students_interval_is_that_of_the_tables():
    # Student's t, two-sided 95 %: 12.706 for one degree of freedom, 2.776 for four.
    assert student_low([0.1, 0.3]) == pytest.approx(0.2 - 12.706 * 0.1, abs=1e-4)
    values = [0.1, 0.35, 0.4, 0.42, 0.6]
    spread = math.sqrt(sum((x - fmean(values)) ** 2 for x in values) / 4)
    assert student_low(values) == pytest.approx(fmean(values) - 2.776 * spread / math.sqrt(5), abs=1e-3)
    assert math.isnan(student_low([0.5]))


@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_differences_of_one_sign_alone_are_no_mark(count):
    """Of two equal methods they are all of one sign once in two, four, eight, sixteen comparisons."""
    gains = [0.01, 0.09, 0.02, 0.3, 0.01][:count]
    figures = {"a": dict(enumerate(gains)), "b": dict.fromkeys(range(count), 0.0)}
    assert paired_difference(figures["a"], figures["b"]).low > 0
    assert best(figures) is None


def test_two_equal_methods_are_marked_once_in_twenty():
    generator = random.Random(0)
    for count in (2, 3, 5):
        marked = 0
        for _ in range(4000):
            a, b = ({seed: generator.gauss(0.5, 0.1) for seed in range(count)} for _ in "ab")
            marked += best({"a": a, "b": b}) is not None
        # 200 expected, with a standard deviation of 14.
        assert 140 < marked < 260, (count, marked)


def test_two_differences_that_happen_to_be_equal_are_no_mark():
    assert best({"a": {0: 0.734, 1: 0.641}, "b": {0: 0.73, 1: 0.637}}) is None
    assert best({"a": {0: 0.734, 1: 0.641, 2: 0.7}, "b": {0: 0.73, 1: 0.637, 2: 0.696}}) == "a"


@pytest.mark.parametrize("count", [2, 5])
def test_a_clear_difference_is_marked(count):
    a = {seed: 0.6 + 0.002 * (seed % 2) for seed in range(count)}
    assert best({"a": a, "b": dict.fromkeys(range(count), 0.4)}) == "a"


def test_no_mark_where_the_difference_may_be_nothing():
    figures = {"a": {0: 0.5, 1: 0.4, 2: 0.6}, "b": {0: 0.4, 1: 0.45, 2: 0.5}}
    assert leader(figures) == "a"
    assert best(figures) is None


def test_no_mark_while_a_method_that_scatters_may_be_better():
    figures = {
        "a": dict.fromkeys(range(5), 0.5),
        "runner-up": dict.fromkeys(range(5), 0.45),
        "wild": {0: 0.9, 1: 0.0, 2: 0.9, 3: 0.0, 4: 0.1},
    }
    assert leader(figures) == "a"
    assert paired_difference(figures["a"], figures["runner-up"]).low > 0
    assert best(figures) is None


def test_no_mark_for_equals_for_a_single_seed_or_for_one_method():
    assert best({"a": {0: 0.5, 1: 0.5}, "b": {0: 0.5, 1: 0.5}}) is None
    assert best({"a": {0: 0.9}, "b": {0: 0.1}}) is None
    assert best({"a": {0: 0.9, 1: 0.9}}) is None
    assert leader({"a": {}, "b": {}}) is None


def test_the_area_is_that_of_trapezoids_over_all_steps():
    points = [(0.0, 0.2), (50.0, 0.6), (100.0, 0.8)]
    assert area(points, steps=100) == pytest.approx((50 * 0.4 + 50 * 0.7) / 100)


def test_the_area_of_a_run_that_failed_holds_its_last_success():
    assert area([(0.0, 0.2), (40.0, 0.4)], steps=100) == pytest.approx((40 * 0.3 + 60 * 0.4) / 100)
    assert area([(0.0, 0.3)], steps=100) == pytest.approx(0.3)
    with pytest.raises(ValueError, match="an evaluation"):
        area([], steps=100)
