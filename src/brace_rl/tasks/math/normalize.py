"""Spellings of one answer made one: unicode, LaTeX that only sets type, separators, units.

What changes a value is left alone. Each step is there for answers among ``tests/data/math_answers.json``.
"""

from __future__ import annotations

import re
import unicodedata

from brace_rl.tasks.math.units import SCALES, is_unit

_SYMBOLS = str.maketrans(
    {
        **dict.fromkeys("−–—‐‑⁻﹣", "-"),
        **dict.fromkeys("\u2062\u200b\ufeff", ""),
        "×": "\\times ",
        "·": "\\cdot ",
        "⋅": "\\cdot ",
        "÷": "/",
        "∕": "/",
        "⁄": "/",
        "π": "\\pi ",
        "∞": "\\infty ",
        "°": "^\\circ ",
        "≤": "\\le ",
        "≥": "\\ge ",
        "≠": "\\ne ",
        "∪": "\\cup ",
        "∩": "\\cap ",
        "∈": "\\in ",
        "±": "\\pm ",
        "¢": "\\text{ cents}",
        "≈": "\\approx ",
        "∅": "\\emptyset ",
    }
)
_VULGAR = re.compile(r"(\d?)\s?([¼-¾⅐-⅞↉])")
_RAISED = re.compile(r"[⁰¹²³⁴-⁹⁻]+")
_LOWERED = re.compile(r"[₀-₉]+")
_ROOT = re.compile(r"√\s*(?:\(([^()]*)\)|([0-9.]+|[A-Za-z]))")

_DELIMITED = re.compile(r"\$\$?([^$]*)\$\$?|\\\((.*)\\\)|\\\[(.*)\\\]", re.DOTALL)
_SPACING = re.compile(r"\\!\s*|\\[,;:>]|\\(?:quad|qquad|displaystyle|textstyle|left|right|[bB]igg?[lr]?)(?![a-zA-Z])")
_SPACES = re.compile(r"(?:(?<!\\)\\ |~|\s)+")
_FRACTION_NAMES = re.compile(r"\\[dtc]frac(?![a-zA-Z])")
_BARE_FRACTION = re.compile(r"\\frac\s*(\d|\{[^{}]*\})\s*(\d|\{[^{}]*\})")
_FONTS = re.compile(
    r"\\(?:mathrm|mathbf|mathit|mathsf|boldsymbol|bm|textbf|textit|textrm|mbox|textnormal|operatorname)\s*\{([^{}]*)\}"
)
_AND = re.compile(r",?\s*(?:\\text\{\s*,?\s*(?:and|or)\s*\}|\b(?:and|or)\b)\s*")
_DECORATION = re.compile(r"\\(?:underline|boldsymbol|(?:text)?color\s*\{[a-zA-Z]+\})\s*\{([^{}]*)\}|\\\\$")
_PERCENT = re.compile(r"\s*(?:\\?%|\\text\{\s*(?:percent|\\?%)\s*\}|\bpercent\b)")
_CURRENCY = re.compile(r"^(-?)\s*(?:\\?\$|€|£|¥|₹|(?:USD|US\$|Rs\.?)\s)\s*(?=[-.\d\\])")
_SPACED_THOUSANDS = re.compile(r"-?\d{1,3}(?: \d{3})+(?:\.\d+)?", re.ASCII)
_POWER = r"(?:\s*\^\s*(?:\d|\{\d\}))?"
_TEXT_AT_END = re.compile(rf"\s*\\text\{{([^{{}}]*)\}}{_POWER}\.?$")
_ORDINAL_AT_END = re.compile(r"(?<=\d)\s*\^\s*\{?\s*\\text\{\s*(st|nd|rd|th)\s*\}\s*\}?$")
_DEGREES_AT_END = re.compile(r"\s*\^\s*(?:\\circ|\{\s*\\circ\s*\})\s*[CF]?$")
_WORDS_AT_END = re.compile(
    r"(?<=[\d}%])\s*((?:[A-Za-z]{2,}|(?<=\s)\(?[A-Za-z]|(?<=\s)\([A-Za-z]{2,})\.?(?:[ /-]+[A-Za-z]+\.?)*\)?)"
    + _POWER
    + "$"
)
_SCALE_AT_END = re.compile(rf"(?<=\d)\s*(?:\\text\{{\s*)?({'|'.join(SCALES)})\b(.*)$")
_ABOUT = re.compile(r"^\s*(?:\\approx(?![a-zA-Z])|=)\s*")
_UNDOTTED = re.compile(r"[.,;:]+$")


def normalize(text: str) -> str:
    """``text`` in one spelling; units, words and signs of currency are kept."""
    text = _plain_characters(text).strip().strip("*").strip()
    match = _DELIMITED.fullmatch(_UNDOTTED.sub("", text))
    if match is not None:
        text = next(group for group in match.groups() if group is not None)
    text = text.replace("{,}", ",").replace("\\lbrace", "\\{").replace("\\rbrace", "\\}")
    text = _SPACES.sub(" ", _SPACING.sub("", text)).strip()
    text = _FONTS.sub(r"\\text{\1}", _DECORATION.sub(r"\1", text))
    text = _BARE_FRACTION.sub(_braced, _FRACTION_NAMES.sub(r"\\frac", text))
    text = _ABOUT.sub("", _PERCENT.sub("%", text).replace("\\varnothing", "\\emptyset"))
    return _UNDOTTED.sub("", text).strip()


def without_unit(text: str) -> str:
    """Normalised ``text`` without what only names a quantity: ``\\$18.90``, ``90^\\circ``, ``20 miles``.

    This is for answers that should be a number; :func:`~brace_rl.tasks.math.units.is_unit` says which words after one
    name what is counted. Words such as *million* become the power of ten they stand for.
    """
    text = _CURRENCY.sub(r"\1", text)
    shorter = _SCALE_AT_END.sub(_scaled, text)
    for unit in (_ORDINAL_AT_END, _TEXT_AT_END, _WORDS_AT_END):
        shorter = unit.sub(_without_a_unit, shorter).strip()
    text = _DEGREES_AT_END.sub("", shorter).strip() or text
    return text.replace(" ", "") if _SPACED_THOUSANDS.fullmatch(text) else text


def without_text(text: str) -> str:
    """Normalised ``text`` without a unit in ``\\text{...}`` at its end, and with ``,`` for *and* between two."""
    text = _AND.sub(",", text)
    return _TEXT_AT_END.sub(_without_a_unit, _CURRENCY.sub(r"\1", text)).strip() or text


def _without_a_unit(match: re.Match[str]) -> str:
    return "" if is_unit(match[1]) else match[0]


def _scaled(match: re.Match[str]) -> str:
    """``\\times 10^{6}`` and the unit, of `` million dollars``."""
    rest = match[2].removesuffix("}").strip() if "\\text" in match[0] else match[2].strip()
    return f"\\times 10^{{{SCALES[match[1]]}}}" if not rest or is_unit(rest) else match[0]


def _plain_characters(text: str) -> str:
    text = _VULGAR.sub(_vulgar_fraction, text)
    text = _RAISED.sub(lambda match: f"^{{{unicodedata.normalize('NFKC', match[0])}}}", text)
    text = _LOWERED.sub(lambda match: f"_{{{unicodedata.normalize('NFKC', match[0])}}}", text)
    text = _ROOT.sub(lambda match: f"\\sqrt{{{match[1] or match[2]}}}", text)
    text = unicodedata.normalize("NFKC", text).translate(_SYMBOLS)
    return "".join(str(unicodedata.decimal(c)) if c.isdecimal() else c for c in text)


def _vulgar_fraction(match: re.Match[str]) -> str:
    numerator, _, denominator = unicodedata.normalize("NFKC", match[2]).partition("\u2044")
    return f"{match[1]} \\frac{{{numerator}}}{{{denominator}}}".lstrip()


def _braced(match: re.Match[str]) -> str:
    parts = [part if part.startswith("{") else f"{{{part}}}" for part in match.groups()]
    return "\\frac" + "".join(parts)
