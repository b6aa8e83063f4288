"""Spellings of one answer made one: unicode, LaTeX that only sets type, separators, units.

What changes a value is left alone. Each step is there for answers among ``tests/data/math_answers.json``.
"""

from __future__ import annotations

import re
import unicodedata

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
_PERCENT = re.compile(r"\s*(?:\\?%|\\text\{\s*(?:percent|\\?%)\s*\}|\bpercent\b)")
_CURRENCY = re.compile(r"^(-?)\s*(?:\\?\$|€|£|¥|₹|(?:USD|US\$|Rs\.?)\s)\s*(?=[-.\d\\])")
_SPACED_THOUSANDS = re.compile(r"-?\d{1,3}(?: \d{3})+(?:\.\d+)?", re.ASCII)
_TEXT_AT_END = re.compile(r"\s*\\text\{[^{}]*\}(?:\s*\^\s*(?:\d|\{\d\}))?\.?$")
_DEGREES_AT_END = re.compile(r"\s*\^\s*(?:\\circ|\{\s*\\circ\s*\})\s*[CF]?$")
_WORDS_AT_END = re.compile(
    r"(?<=[\d}%])\s*(?:[A-Za-z]{2,}\.?|(?<=\s)[A-Za-z])(?:[ /-]+[A-Za-z]+)*(?:\s*\^\s*(?:\d|\{\d\}))?$"
)
_JOINED = re.compile(r"\b(?:or|and|not)\b")
_UNDOTTED = re.compile(r"[.,;:]+$")


def normalize(text: str) -> str:
    """``text`` in one spelling; units, words and signs of currency are kept."""
    text = _plain_characters(text).strip().strip("*").strip()
    match = _DELIMITED.fullmatch(_UNDOTTED.sub("", text))
    if match is not None:
        text = next(group for group in match.groups() if group is not None)
    text = text.replace("{,}", ",").replace("\\lbrace", "\\{").replace("\\rbrace", "\\}")
    text = _SPACES.sub(" ", _SPACING.sub("", text)).strip()
    text = _FONTS.sub(r"\\text{\1}", text)
    text = _BARE_FRACTION.sub(_braced, _FRACTION_NAMES.sub(r"\\frac", text))
    text = _PERCENT.sub("%", text)
    return _UNDOTTED.sub("", text).strip()


def without_unit(text: str) -> str:
    """Normalised ``text`` without what only names a quantity: ``\\$18.90``, ``90^\\circ``, ``20 miles``.

    Words are taken for a unit where they stand after a number, so this is for answers that should be one.
    """
    text = _CURRENCY.sub(r"\1", text)
    shorter = text
    for unit in (_TEXT_AT_END, _WORDS_AT_END, _DEGREES_AT_END):
        # "5 or six" is two answers, not an amount of something.
        shorter = unit.sub(lambda match: match[0] if _JOINED.search(match[0]) else "", shorter).strip()
    text = shorter or text
    return text.replace(" ", "") if _SPACED_THOUSANDS.fullmatch(text) else text


def without_text(text: str) -> str:
    """Normalised ``text`` without a ``\\text{...}`` after an expression, and with ``,`` for *and* between two."""
    text = _AND.sub(",", text)
    return _TEXT_AT_END.sub("", _CURRENCY.sub(r"\1", text)).strip() or text


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
