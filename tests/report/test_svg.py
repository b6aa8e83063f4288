"""The drawn charts."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brace_rl.report.svg import BINS, Line, line_chart, number, stacked_chart


def paths(svg: str, kind: str) -> list[list[tuple[float, float]]]:
    """Points of the paths whose class begins with ``kind``."""
    found = []
    for element in ET.fromstring(svg).iter("path"):
        if element.get("class", "").startswith(kind):
            numbers = [float(text) for text in re.findall(r"-?\d+\.\d+", element.get("d", ""))]
            found.append(list(zip(numbers[::2], numbers[1::2], strict=True)))
    return found


def test_larger_values_are_drawn_higher_and_later_steps_further_right():
    [curve] = paths(line_chart("t", [Line("a", [(1, 0.0), (2, 1.0), (3, 3.0)])]), "line")
    assert [x for x, _ in curve] == sorted(x for x, _ in curve)
    heights = [y for _, y in curve]
    assert heights == sorted(heights, reverse=True)
    assert (heights[0] - heights[1]) / (heights[1] - heights[2]) == pytest.approx(0.5, abs=0.01)


def test_a_value_that_is_not_finite_leaves_a_gap():
    svg = line_chart("t", [Line("a", [(1, 0.0), (2, 1.0), (3, math.nan), (4, 1.0), (5, 0.0)])])
    [d] = re.findall(r'class="line c1" d="([^"]*)"', svg)
    assert (d.count("M"), d.count("L")) == (2, 2)


def test_no_spike_is_lost_in_a_long_series_and_the_picture_stays_small():
    points = [(float(step), 0.0) for step in range(50_000)]
    points[12_345] = (12_345.0, 9.0)
    svg = line_chart("t", [Line("a", points)], floor=0)
    [curve] = paths(svg, "line")
    assert len(curve) <= 2 * BINS
    assert min(y for _, y in curve) < min(y for _, y in curve[:10]) - 50
    assert len(svg) < 10_000


def test_a_moving_average_is_drawn_over_the_faint_values_and_keeps_a_straight_line_straight():
    svg = line_chart("t", [Line("a", [(float(s), 2.0 * s) for s in range(60)], smooth=True)])
    [faint], [line] = paths(svg, "faint"), paths(svg, "line")
    middle = len(line) // 2
    assert line[middle] == pytest.approx(faint[middle], abs=0.2)
    assert len(line) == len(faint) == 60


def test_values_over_orders_of_magnitude_get_a_logarithmic_axis_only_where_allowed():
    points = [(1.0, 1.0), (2.0, 10.0), (3.0, 100.0)]
    [curve] = paths(line_chart("t", [Line("a", points)], allow_log=True), "line")
    assert curve[0][1] - curve[1][1] == pytest.approx(curve[1][1] - curve[2][1], abs=0.2)
    [curve] = paths(line_chart("t", [Line("a", points)]), "line")
    assert curve[0][1] - curve[1][1] < 0.2 * (curve[1][1] - curve[2][1])


def test_areas_lie_on_top_of_each_other():
    svg = stacked_chart("t", [Line("a", [(1, 1.0), (2, 1.0)]), Line("b", [(1, 2.0), (2, math.nan)], colour=2)])
    lower, upper = paths(svg, "area")
    assert lower[:2] == upper[:1:-1]  # the upper area comes back along the top of the lower
    assert upper[1] == lower[1]  # NaN counts as 0


@pytest.mark.parametrize(("low", "high"), [(0.7483, 0.9028), (0.0, 0.0), (-3.0, 8.1), (1e-7, 2e-7), (5.0, 5.0)])
def test_the_axis_ends_on_labelled_ticks(low, high):
    svg = line_chart("t", [Line("a", [(1, low), (2, high)])])
    levels = [float(y) for y in re.findall(r'class="grid" d="M\d+ ([\d.]+)H', svg)]
    assert max(levels) == pytest.approx(186, abs=0.1)
    assert min(levels) == pytest.approx(10, abs=0.1)
    assert 3 <= len(levels) <= 7


@pytest.mark.parametrize(
    ("low", "high", "labels"),
    [
        (0.0, 1.0, ["0.00", "0.25", "0.50", "0.75", "1.00"]),
        (0.9991, 1.0018, ["0.999", "1.000", "1.001", "1.002"]),
        (12_345, 12_349, ["12345", "12346", "12347", "12348", "12349"]),
        (0, 40_000, ["0", "10k", "20k", "30k", "40k"]),
        (0, 4e-7, ["0", "1e-7", "2e-7", "3e-7", "4e-7"]),
    ],
)
def test_ticks_can_be_told_apart(low, high, labels):
    svg = line_chart("t", [Line("a", [(1, low), (2, high)])])
    assert re.findall(r'text-anchor="end">([^<]*)<', svg) == labels


def test_rounding_is_drawn_as_a_constant():
    [curve] = paths(line_chart("t", [Line("a", [(1, 1.0), (2, 1.0000004)])]), "line")
    assert abs(curve[0][1] - curve[1][1]) <= 0.1


@given(
    st.lists(st.one_of(st.floats(), st.floats(0, 1)), max_size=400),
    st.booleans(),
    st.booleans(),
)
def test_any_series_gives_wellformed_xml_inside_the_frame(values, allow_log, smooth):
    points = [(float(step), value) for step, value in enumerate(values)]
    svg = line_chart("<t>", [Line("a", points, smooth=smooth)], floor=0, reference=1, allow_log=allow_log)
    if any(abs(value) < 1e200 for value in values):
        assert "nan" not in svg
        assert "inf" not in svg
        for curve in paths(svg, "line"):
            assert all(0 <= x <= 400 and 0 <= y <= 210 for x, y in curve)
    else:
        assert svg == ""


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (3.0, "3"),
        (0.123456, "0.1235"),
        (12345.6, "12,346"),
        (1e-7, "1.00e-7"),
        (2.5e9, "2.50e9"),
        (math.nan, "not finite"),
        (-0.5, "-0.5"),
    ],
)
def test_figures_are_written_short(value, text):
    assert number(value) == text
