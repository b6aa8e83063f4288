"""Whether two answers are the same: at once where numbers and words decide it, else with math-verify.

:func:`decide` is cheap, exact and runs in the trainer; it settles every answer of AIME and DAPO-Math that is a number.
:func:`prove` calls math-verify, which may take seconds or for ever on a hostile answer, and runs in a worker process.
"""

from __future__ import annotations

import re
from fractions import Fraction

from brace_rl.tasks.math.normalize import normalize, without_text, without_unit
from brace_rl.tasks.math.numerals import SIGNIFICANT_DIGITS, Numeral, parse_numeral, same_number

_BASE = re.compile(r"([0-9A-Z]+)_(?:\{(\d+)\}|(\d+)|\{?\\text\{(\w+)\}\}?)", re.ASCII)
_BARE = re.compile(r"[0-9A-Z]+", re.ASCII)
_ASSIGNMENT = re.compile(r"(\\?[A-Za-z](?:_\{?\w+\}?|\([a-z]\))?) ?= ?([^=<>]+)")
_WORDS = re.compile(r"\\text\{([^{}]*)\}|([A-Za-z]{3,}(?:[ -][A-Za-z]+)*)|(yes|no)", re.IGNORECASE)
_CHOICE = re.compile(r"(?:\\text\{)?\s*\(?([A-Z])\)?\.?\s*\}?")
_CHOICE_WITH_TEXT = re.compile(r"(?:\\text\{)?\s*\(([A-Z])\)\s*\}?\s*[^\s,].*")
_EXPONENT = re.compile(r"\^\s*([A-Za-z]|\\(?:pi|alpha|beta|theta|lambda|mu)(?![A-Za-z]))")
_DECIMAL = re.compile(r"(?<![\d.])(?:(?<!\d,)\d+|(?<=\d,)(?!\d{3}\.)\d+)\.\d+(?![\d.]|\s*\\?%)", re.ASCII)
"""Not the end of a number with thousands groups."""
_TRIGONOMETRIC = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-zA-Z])")
_DEGREES = re.compile(r"(\d+(?:\.\d+)?)\s*\^\s*(?:\\circ|\{\s*\\circ\s*\})")
_IMAGINARY = re.compile(r"(\d)i(?![A-Za-z])")
_SEPARATORS = re.compile(r",|\\[{}]")
_PLUS_MINUS = "\\pm"
_OR = re.compile(r"(?:\\text\{\s*,?\s*or\s*\}|\bor\b)")
_MATH_SIGNS = re.compile(r"\\?\$|(?<!\\)\\[()]")
"""math-verify would take what stands between two of them for an answer of its own, and the last of several."""
_LESS, _GREATER = "\\lt", "\\gt"
_RAY = re.compile(r"[a-zA-Z] ?(<=?|>=?|\\(?:leq?|geq?|lt|gt)(?![a-z])) ?([^<>,]+)")
_MEMBERSHIP = re.compile(r"[a-z] ?\\in ?(.+)")


def decide(given: str, gold: str) -> bool | None:
    """The verdict where it takes no algebra, else None. Both are answers as they were extracted."""
    given, gold = normalize(given), normalize(gold)
    if not given:
        return False
    if _closed_up(given) == _closed_up(gold):
        return True
    given, gold = _right_hand_sides(given, gold)
    number = parse_numeral(without_unit(gold))
    if number is not None:
        answer = parse_numeral(without_unit(given))
        return None if answer is None else same_number(answer, number)
    for rule in (_same_base, _same_choice, _same_words):
        verdict = rule(given, gold)
        if verdict is not None:
            return verdict
    return None


def prove(given: str, gold: str) -> bool:
    """The verdict of math-verify on the normalised answers. Blocks for as long as that takes."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse, verify

    given, gold = _right_hand_sides(normalize(given), normalize(gold))
    # Its own way with units takes the m of "n \\le m" for metres and leaves "n \\le".
    config = LatexExtractionConfig(
        normalization_config=NormalizationConfig(
            basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none", equations=False
        )
    )
    # Limits are the worker's business: those of math-verify need SIGALRM and the main thread.
    parsed = [parse(f"${_readable(text)}$", [config], parsing_timeout=None) for text in (gold, given)]
    if not parsed[0] or not parsed[1]:
        return False
    return bool(verify(parsed[0], parsed[1], timeout_seconds=None, allow_set_relation_comp=True))


def _readable(text: str) -> str:
    """Normalised ``text`` as math-verify reads it right."""
    text = without_text(_union(_MATH_SIGNS.sub(" ", text)))
    text = _IMAGINARY.sub(r"\1 i", _EXPONENT.sub(r"^{\1}", text))
    if "\\pm" in text and not _SEPARATORS.search(text):
        text = f"{text.replace(_PLUS_MINUS, '+')},{text.replace(_PLUS_MINUS, '-')}"
    return _DECIMAL.sub(lambda match: _exact(match[0]), _in_radians(text))


def _in_radians(text: str) -> str:
    """``\\sin 30^\\circ`` as the sine of a sixth of pi. math-verify drops the degrees."""
    return _DEGREES.sub(r"(\\frac{\1}{180}\\pi)", text) if _TRIGONOMETRIC.search(text) else text


def _union(text: str) -> str:
    """Inequalities joined by *or* as a union of intervals: ``x<2 or x>3`` is ``(-\\infty,2)\\cup(3,\\infty)``."""
    parts = [_RAY.fullmatch(part.strip()) for part in _OR.split(text)]
    rays = [part for part in parts if part is not None]
    if len(parts) < 2 or len(rays) < len(parts):
        return text
    return "\\cup".join(_interval(ray[1], ray[2].strip()) for ray in rays)


def _interval(relation: str, end: str) -> str:
    if relation.startswith((">", "\\g")):
        return f"{'(' if relation in ('>', _GREATER) else '['}{end},\\infty)"
    return f"(-\\infty,{end}{')' if relation in ('<', _LESS) else ']'}"


def _right_hand_sides(given: str, gold: str) -> tuple[str, str]:
    """``5`` of ``x = 5`` where the other answer names no or the same variable, ``[-2,7]`` of ``x \\in [-2,7]``."""
    member, members = _MEMBERSHIP.fullmatch(given), _MEMBERSHIP.fullmatch(gold)
    given, gold = (member[1] if member else given), (members[1] if members else gold)
    left, right = _ASSIGNMENT.fullmatch(given), _ASSIGNMENT.fullmatch(gold)
    if left and right and left[1] != right[1]:
        return given, gold
    if (left and "=" not in gold) or (left and right):
        given = left[2].strip()
    if right and "=" not in given:
        gold = right[2].strip()
    return given, gold


def _same_base(given: str, gold: str) -> bool | None:
    """Numerals with a base, ``52_8``. math-verify drops the base, so that ``52_9`` would do."""
    right = _BASE.fullmatch(gold)
    if right is None:
        return None
    left = _BASE.fullmatch(given)
    if left is not None:
        return left.group(1) == right.group(1) and _base_of(left) == _base_of(right)
    return given == right[1] if _BARE.fullmatch(given) else None


def _base_of(match: re.Match[str]) -> str:
    names = {"two": "2", "three": "3", "four": "4", "five": "5", "six": "6", "seven": "7", "eight": "8", "nine": "9"}
    base = next(group for group in match.groups()[1:] if group)
    return names.get(base, base)


def _same_choice(given: str, gold: str) -> bool | None:
    """A letter of a multiple choice, ``\\text{(C)}`` or ``\\text{(C) } 12``; where one side has the letter alone."""
    right, left = _CHOICE.fullmatch(gold), _CHOICE.fullmatch(given)
    if left is None and right is not None:
        left = _CHOICE_WITH_TEXT.fullmatch(given)
    elif right is None and left is not None:
        right = _CHOICE_WITH_TEXT.fullmatch(gold)
    return None if right is None or left is None else left[1] == right[1]


def _same_words(given: str, gold: str) -> bool | None:
    """Words, ``\\text{Evelyn}``. math-verify reads letters as factors, so that ``seat`` would do for ``east``."""
    if _WORDS.fullmatch(gold) is None or not _letters(gold):
        return None
    return _letters(given) == _letters(gold)


def _closed_up(text: str) -> str:
    """Without spaces, but for those after a digit or comma and before a digit: ``58, 500`` is not ``58,500``."""
    return re.sub(r"(?<![\d,]) | (?!\d)", "", text)


def _letters(text: str) -> str:
    return re.sub(r"[\W_]+", "", text.replace("\\text", "").casefold())


def _exact(text: str) -> str:
    """A short decimal as a fraction: math-verify would compare it to six places, and 0.000067 with 0.0000672 so."""
    number = parse_numeral(text)
    if number is None or number.places is None or number.percent or _significant(number) >= SIGNIFICANT_DIGITS:
        return text
    value = number.value
    return f"{'-' if value < 0 else ''}\\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"


def _significant(number: Numeral) -> int:
    return len(str(abs(number.value * Fraction(10) ** (number.places or 0)).numerator))
