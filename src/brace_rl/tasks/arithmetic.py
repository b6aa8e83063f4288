"""Exact arithmetic on text a model wrote: a recursive-descent parser over fractions, no ``eval``.

Grammar, loosest binding first::

    sum     = product (("+" | "-") product)*
    product = unary (("*" | "/" | "//" | "%") unary)*
    unary   = ("-" | "+") unary | power
    power   = percent (("^" | "**") unary)?          right-associative; -2^2 is -4
    percent = atom "%"*                              "%" is a percent sign unless a number or "(" follows it
    atom    = number | "(" sum ")"

A number may carry thousands separators (``1,000``) and decimals (``3.5``, ``.5``, ``5.``). The signs × ÷ − · are read
as their ASCII spellings. Time and memory are bounded by the limits of :func:`evaluate`, whatever the input.
"""

from __future__ import annotations

import re
from fractions import Fraction

MAX_LENGTH = 300
"""Longest expression, in characters."""
MAX_DIGITS = 40
"""Most digits of a literal, and of the numerator and the denominator of every intermediate value."""
MAX_EXPONENT = 100
"""Largest absolute exponent."""
MAX_DEPTH = 40
"""Deepest nesting of parentheses, signs and exponents; keeps the recursion far from the interpreter's limit."""

_SPELLINGS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-"})
_TOKEN = re.compile(
    r"""\s*(?:(?P<number>(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d*)?|\.\d+)
            |(?P<operator>\*\*|//|[-+*/%^()]))""",
    re.ASCII | re.VERBOSE,
)
_END = ""


class ArithmeticInputError(ValueError):
    """An expression that cannot be evaluated; the message is short, since a model is to read it."""


def evaluate(
    expression: str,
    *,
    max_length: int = MAX_LENGTH,
    max_digits: int = MAX_DIGITS,
    max_exponent: int = MAX_EXPONENT,
    max_operations: int | None = None,
) -> Fraction:
    """The exact value of ``expression``.

    Args:
        max_length: longest expression, in characters.
        max_digits: most digits of any literal, numerator or denominator; a power is checked before it is computed.
        max_exponent: largest absolute exponent; exponents are integers.
        max_operations: most binary operations (signs and percent signs are none); None for no limit.

    Raises:
        ArithmeticInputError: not an expression of the grammar above, a division by zero, or a limit exceeded.
    """
    return _Parser(expression, max_length, max_digits, max_exponent, max_operations).run()


def count_operations(expression: str) -> int:
    """Number of binary operations in ``expression``, under the default limits of :func:`evaluate`.

    Raises:
        ArithmeticInputError: as :func:`evaluate`.
    """
    parser = _Parser(expression, MAX_LENGTH, MAX_DIGITS, MAX_EXPONENT, None)
    parser.run()
    return parser.operations


def format_number(value: Fraction, *, decimals: int = 6, significant: int = 4) -> str:
    """``value`` as short positional decimal text: ``24``, ``0.5``, ``0.333333``; never an exponent or a fraction.

    Integers are plain. Others are rounded to ``decimals`` places, more where that would leave fewer than
    ``significant`` digits of a small number; trailing zeros are dropped.
    """
    if value.denominator == 1:
        return str(value.numerator)
    scaled = round(value * 10**decimals)
    while abs(scaled) < 10 ** (significant - 1):
        decimals += 1
        scaled = round(value * 10**decimals)
    digits = str(abs(scaled)).rjust(decimals + 1, "0")
    fraction = digits[-decimals:].rstrip("0")
    sign = "-" if scaled < 0 else ""
    return f"{sign}{digits[:-decimals]}" + (f".{fraction}" if fraction else "")


class _Parser:
    """One pass over one expression; values are computed as they are parsed."""

    def __init__(
        self, expression: str, max_length: int, max_digits: int, max_exponent: int, max_operations: int | None
    ) -> None:
        if len(expression) > max_length:
            raise ArithmeticInputError(f"longer than {max_length} characters")
        self.max_digits = max_digits
        self.limit = 10**max_digits
        self.max_exponent = max_exponent
        self.max_operations = max_operations
        self.operations = 0
        self.depth = 0
        self.tokens = _tokenize(expression)
        self.position = 0

    def run(self) -> Fraction:
        value = self.sum()
        if self.next != _END:
            raise ArithmeticInputError(f"unexpected {_shorten(self.next)!r}")
        return value

    @property
    def next(self) -> str:
        return self.tokens[self.position]

    def take(self) -> str:
        token = self.tokens[self.position]
        self.position += 1
        return token

    def sum(self) -> Fraction:
        value = self.product()
        while self.next in ("+", "-"):
            operator = self.take()
            value = self.apply(operator, value, self.product())
        return value

    def product(self) -> Fraction:
        value = self.unary()
        while self.next in ("*", "/", "//", "%"):
            operator = self.take()
            value = self.apply(operator, value, self.unary())
        return value

    def unary(self) -> Fraction:
        # Every recursion of the grammar passes through here, so this is the one place that counts depth.
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise ArithmeticInputError("nested too deeply")
        if self.next in ("-", "+"):
            value = -self.unary() if self.take() == "-" else self.unary()
        else:
            value = self.power()
        self.depth -= 1
        return value

    def power(self) -> Fraction:
        base = self.percent()
        if self.next in ("^", "**"):
            self.take()
            return self.apply("^", base, self.unary())
        return base

    def percent(self) -> Fraction:
        value = self.atom()
        while self.next == "%" and not self.starts_operand(self.tokens[self.position + 1]):
            self.take()
            value = self.bounded(value / 100)
        return value

    @staticmethod
    def starts_operand(token: str) -> bool:
        return token == "(" or token[:1].isdigit() or token[:1] == "."

    def atom(self) -> Fraction:
        token = self.take()
        if token == "(":
            value = self.sum()
            if self.take() != ")":
                raise ArithmeticInputError("missing ')'")
            return value
        if not self.starts_operand(token):
            raise ArithmeticInputError(f"unexpected {token!r}" if token else "incomplete expression")
        if sum(character.isdigit() for character in token) > self.max_digits:
            raise ArithmeticInputError("number too large")
        return Fraction(token.replace(",", ""))

    def apply(self, operator: str, left: Fraction, right: Fraction) -> Fraction:
        self.operations += 1
        if self.max_operations is not None and self.operations > self.max_operations:
            raise ArithmeticInputError(f"more than {self.max_operations} operations")
        if operator == "^":
            return self.bounded(self.raise_to(left, right))
        if operator in ("/", "//", "%") and right == 0:
            raise ArithmeticInputError("division by zero")
        if operator == "+":
            return self.bounded(left + right)
        if operator == "-":
            return self.bounded(left - right)
        if operator == "*":
            return self.bounded(left * right)
        if operator == "/":
            return self.bounded(left / right)
        if operator == "//":
            return self.bounded(Fraction(left // right))
        return self.bounded(left % right)

    def raise_to(self, base: Fraction, exponent: Fraction) -> Fraction:
        if exponent.denominator != 1:
            raise ArithmeticInputError("exponent must be an integer")
        if abs(exponent) > self.max_exponent:
            raise ArithmeticInputError("exponent too large")
        if base == 0 and exponent < 0:
            raise ArithmeticInputError("division by zero")
        # |base| >= 2 ** (bits - 1), so a power beyond the limit is known before a single multiplication.
        bits = max(base.numerator.bit_length(), base.denominator.bit_length())
        if (bits - 1) * abs(exponent) > self.limit.bit_length():
            raise ArithmeticInputError("number too large")
        return base ** int(exponent)

    def bounded(self, value: Fraction) -> Fraction:
        if abs(value.numerator) >= self.limit or value.denominator >= self.limit:
            raise ArithmeticInputError("number too large")
        return value


def _tokenize(expression: str) -> list[str]:
    text = expression.translate(_SPELLINGS).rstrip()
    tokens: list[str] = []
    position = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise ArithmeticInputError(f"unexpected {text[position:].lstrip()[:1]!r}")
        tokens.append(match["number"] or match["operator"])
        position = match.end()
    tokens.append(_END)
    return tokens


def _shorten(token: str, width: int = 12) -> str:
    return token if len(token) <= width else token[:width] + "..."
