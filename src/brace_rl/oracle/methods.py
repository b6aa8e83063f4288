"""The value targets under comparison, by name. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass

from brace_rl.errors import BraceError

PARAMETERS = {
    "mc": None,
    "gae": ("lambda", 0.95),
    "vtrace": None,
    "uncapped": None,
    "capped": ("window", 100.0),
    "brace": ("window", 100.0),
    "drift": ("eps", 0.1),
    "path": ("budget", 1.0),
}
"""Name to its parameter and that parameter's default. The paper gives 100; the others are this project's choice."""

UNCLIPPED = ("mc", "gae", "vtrace")
"""Kinds whose clips are no option: without ratios, or 1 by definition."""

MEANINGS = {
    "mc": "the realised return (PPO)",
    "gae": "generalised advantage estimation, gae:LAMBDA",
    "vtrace": "V-trace over the whole response, both clips 1",
    "uncapped": "V-trace over the whole response, with BRACE's clips",
    "capped": "V-trace whose product stops after WINDOW tokens, capped:WINDOW",
    "brace": "BRACE, brace:WINDOW",
    "drift": "BRACE, one window per batch from the measured drift, drift:EPS",
    "path": "BRACE, one window per position from the ratios ahead, path:BUDGET",
}


@dataclass(frozen=True)
class Method:
    """A value target with its options.

    Attributes:
        kind: a key of ``PARAMETERS``.
        parameter: of that kind; 0 where it has none.
        rho_clip, c_clip: caps of the residual's and the trace's ratio (``vtrace`` has 1 and 1).
    """

    kind: str
    parameter: float = 0.0
    rho_clip: float = 1.2
    c_clip: float = 1.1

    @property
    def name(self) -> str:
        """As :func:`parse_method` reads it; clips are named where they are one and the same."""
        number = "" if PARAMETERS[self.kind] is None else f":{self.parameter:g}"
        clip = f"@{self.c_clip:g}" if self.rho_clip == self.c_clip and self.kind not in UNCLIPPED else ""
        return f"{self.kind}{number}{clip}"

    @property
    def window(self) -> int:
        """Policy tokens, for the kinds whose parameter is one."""
        return int(self.parameter)


def parse_method(text: str, *, rho_clip: float = 1.2, c_clip: float = 1.1) -> Method:
    """``NAME[:NUMBER][@CLIP]`` to a :class:`Method`; the clip is that of residual and trace both.

    Raises:
        BraceError: an unknown name, or a number outside its range.
    """
    named, at, clip = text.strip().partition("@")
    kind, colon, number = named.partition(":")
    if kind not in PARAMETERS:
        raise BraceError(f"method {text!r}: unknown; choose from {', '.join(PARAMETERS)}")
    if at:
        if kind in UNCLIPPED:
            raise BraceError(f"method {text!r}: {kind} takes no clip")
        rho_clip = c_clip = _number(text, clip, "CLIP")
        if not c_clip > 0:
            raise BraceError(f"method {text!r}: the clip must be above 0 (inf for no cap)")
    parameter = PARAMETERS[kind]
    if kind == "vtrace":
        rho_clip = c_clip = 1.0
    if parameter is None:
        if colon:
            raise BraceError(f"method {text!r}: {kind} takes no number")
        return Method(kind, rho_clip=rho_clip, c_clip=c_clip)
    meaning, value = parameter
    if colon:
        value = _number(text, number, meaning.upper())
    _check_parameter(text, kind, value)
    return Method(kind, value, rho_clip=rho_clip, c_clip=c_clip)


def _number(text: str, word: str, meaning: str) -> float:
    try:
        return float(word)
    except ValueError:
        raise BraceError(f"method {text!r}: {word!r} is not a number ({meaning})") from None


def _check_parameter(text: str, kind: str, value: float) -> None:
    fits = {
        "gae": (0 <= value <= 1, "lambda must be between 0 and 1"),
        "capped": (value >= 0 and value % 1 == 0, "the window must be a whole number of tokens, 0 or more"),
        "brace": (value >= 0 and value % 1 == 0, "the window must be a whole number of tokens, 0 or more"),
        "drift": (0 < value < 1, "eps must be between 0 and 1"),
        "path": (value >= 0, "the budget must be at least 0"),
    }
    fit, rule = fits[kind]
    if not fit:
        raise BraceError(f"method {text!r}: {rule}")
