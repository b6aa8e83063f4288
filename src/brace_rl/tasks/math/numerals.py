"""Exact values of answers that are a number, however it is written."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

LONGEST_NUMBER = 200
"""Characters; anything longer is not read as one number."""

SIGNIFICANT_DIGITS = 6
"""A decimal with this many significant digits or more stands for the fraction it rounds: 0.333333 is 1/3, 0.33 not."""

# Thousands groups are all of three digits; "1,2" and "1,23" are lists.
_WHOLE = r"(?:\d{1,3}(?:,\d{3})+|\d+)"
_DECIMAL = re.compile(rf"(?P<whole>{_WHOLE})?(?:\.(?P<places>\d*))?", re.ASCII)
_FRACTION = re.compile(
    rf"(?P<mixed>{_WHOLE}(?:\s+|(?=\\)))?"
    rf"(?:\\frac\s*\{{\s*(?P<n1>-?{_WHOLE})\s*\}}\s*\{{\s*(?P<d1>-?{_WHOLE})\s*\}}|(?P<n2>{_WHOLE})\s*/\s*(?P<d2>{_WHOLE}))",
    re.ASCII,
)
_REPEATING = re.compile(
    rf"(?P<whole>{_WHOLE})?\.(?P<places>\d*)\\(?:overline|bar|dot)\s*(?:\{{\s*(?P<r1>\d+)\s*\}}|(?P<r2>\d))", re.ASCII
)
_SCIENTIFIC = re.compile(
    r"(?P<mantissa>\d+(?:\.\d+)?)\s*(?:\*|\\times|\\cdot)\s*10\s*\^\s*(?:\{\s*(?P<e1>-?\d{1,2})\s*\}|(?P<e2>-?\d{1,2}))"
    r"|(?P<m3>\d+(?:\.\d+)?)[eE](?P<e3>[+-]?\d{1,2})",
    re.ASCII,
)


@dataclass(frozen=True)
class Numeral:
    """A number as written.

    Attributes:
        value: exact; of ``17%`` it is 17.
        places: digits after the decimal point; None where it has no decimal point.
        percent: a percent sign follows.
    """

    value: Fraction
    places: int | None = None
    percent: bool = False


def parse_numeral(text: str) -> Numeral | None:
    """The number that normalised ``text`` is, or None: ``1,234``, ``-.5``, ``7.``, ``3/4``, ``\\frac{3}{4}``,
    ``1 \\frac{4}{5}``, ``1 4/5``, ``17\\%``, ``1.5\\times 10^{3}``, ``1e3``, ``0.1\\overline{6}``."""
    if len(text) > LONGEST_NUMBER:
        return None
    text = text.strip()
    percent = text.endswith("%")
    if percent:
        text = text[:-1].rstrip("\\ ")
    sign = 1
    while text[:1] in ("-", "+"):
        sign = -sign if text[0] == "-" else sign
        text = text[1:].lstrip()
    number = _parse_unsigned(text)
    return None if number is None else Numeral(sign * number.value, number.places, percent)


def same_number(given: Numeral, gold: Numeral) -> bool:
    """Whether two numbers are the same answer.

    Exactly equal values are. A percent sign on one side alone is ignored (the question asked for percent), or read as
    hundredths. A long enough decimal stands for a fraction that it rounds.
    """
    if _same_value(given, gold):
        return True
    if given.percent == gold.percent:
        return False
    return _same_value(*(_hundredths(number) if number.percent else number for number in (given, gold)))


def _hundredths(percent: Numeral) -> Numeral:
    return Numeral(percent.value / 100, None if percent.places is None else percent.places + 2)


def _same_value(one: Numeral, other: Numeral) -> bool:
    return one.value == other.value or _rounds(one, other) or _rounds(other, one)


def _rounds(decimal: Numeral, fraction: Numeral) -> bool:
    """Whether ``decimal`` is ``fraction``, which has no finite decimal form of its own, rounded or cut."""
    if decimal.places is None or fraction.places is not None or fraction.value.denominator == 1:
        return False
    shown = str(abs(decimal.value.numerator * 10**decimal.places // decimal.value.denominator)).lstrip("0")
    return len(shown) >= SIGNIFICANT_DIGITS and abs(decimal.value - fraction.value) < Fraction(1, 10**decimal.places)


def _parse_unsigned(text: str) -> Numeral | None:
    match = _DECIMAL.fullmatch(text)
    if match is not None and (match["whole"] or match["places"]):
        whole = (match["whole"] or "0").replace(",", "")
        places = match["places"]
        if not places:
            return Numeral(Fraction(int(whole)))
        return Numeral(Fraction(int(whole + places), 10 ** len(places)), len(places))
    match = _FRACTION.fullmatch(text)
    if match is not None:
        return _fraction(match)
    match = _REPEATING.fullmatch(text)
    if match is not None:
        places, repeated = match["places"], match["r1"] or match["r2"]
        finite = Fraction(int((match["whole"] or "0").replace(",", "") + places), 10 ** len(places))
        return Numeral(finite + Fraction(int(repeated), 10 ** len(places) * (10 ** len(repeated) - 1)))
    match = _SCIENTIFIC.fullmatch(text)
    if match is not None:
        exponent = int(match["e1"] or match["e2"] or match["e3"])
        return Numeral(Fraction(match["mantissa"] or match["m3"]) * Fraction(10) ** exponent)
    return None


def _fraction(match: re.Match[str]) -> Numeral | None:
    numerator, denominator = (
        int(part.replace(",", "")) for part in (match["n1"] or match["n2"], match["d1"] or match["d2"])
    )
    if denominator == 0:
        return None
    value = Fraction(numerator, denominator)
    if match["mixed"]:
        # What stands before a fraction that is not a proper one is a factor or a slip, not the whole part of a number.
        if not 0 < value < 1:
            return None
        value += int(match["mixed"].strip().replace(",", ""))
    return Numeral(value)
