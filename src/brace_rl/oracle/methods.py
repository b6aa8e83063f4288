"""What is compared, by name: a value target, and a rule for the actor that is chosen apart from it. Loads no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pydantic import ValidationError

from brace_rl.actor.options import RULE_OPTIONS
from brace_rl.errors import BraceError
from brace_rl.section import first_problem

PARAMETERS = {
    "mc": None,
    "gae": ("lambda", 0.95),
    "vtrace": None,
    "uncapped": None,
    "capped": ("window", 100.0),
    "brace": ("window", 100.0),
    "drift": ("eps", 0.1),
    "path": ("budget", 1.0),
    "group": None,
    "group_brace": ("window", 100.0),
}
"""Name to its parameter and that parameter's default. The paper gives 100; the others are this project's choice."""

UNCLIPPED = ("mc", "gae", "vtrace", "group")
"""Kinds whose clips are no option: without ratios, or 1 by definition."""

CRITIC_FREE = ("group", "group_brace")
"""Kinds whose advantage uses no critic; one is fitted to the return beside them, to be looked at."""

WHOLE_BATCH_RULES = ("m2po", "ppo_ewma_revised")
"""Actor rules that decide by the whole minibatch of one run, whereas here the batches of all seeds are one."""

AUTOMATIC = ("drift", "path")
"""Kinds that choose their window."""

MEANINGS = {
    "mc": "the realised return (PPO)",
    "gae": "generalised advantage estimation, gae:LAMBDA",
    "vtrace": "V-trace over the whole response, both clips 1",
    "uncapped": "V-trace over the whole response, with BRACE's clips",
    "capped": "V-trace whose product stops after WINDOW tokens, capped:WINDOW",
    "brace": "BRACE, brace:WINDOW",
    "drift": "BRACE, one window per batch from the measured drift, drift:EPS",
    "path": "BRACE, one window per position from the ratios ahead, path:BUDGET",
    "group": "no critic: reward minus the mean of the batch, whose responses all have one prompt (GRPO)",
    "group_brace": "the same times the weight of BRACE's window, group_brace:WINDOW",
}


@dataclass(frozen=True)
class Method:
    """A value target with its options.

    Attributes:
        kind: a key of ``PARAMETERS``.
        parameter: of that kind; 0 where it has none.
        rho_clip, c_clip: caps of the residual's and the trace's ratio (``vtrace`` has 1 and 1).
        rule: of the actor, a key of :data:`brace_rl.actor.options.RULE_OPTIONS`.
        rule_options: of that rule where they are not its defaults.
    """

    kind: str
    parameter: float = 0.0
    rho_clip: float = 1.2
    c_clip: float = 1.1
    rule: str = "ppo"
    rule_options: tuple[tuple[str, float | str], ...] = ()

    @property
    def name(self) -> str:
        """As :func:`parse_method` reads it; clips are named where they are not the paper's."""
        number = "" if PARAMETERS[self.kind] is None else f":{self.parameter:g}"
        return f"{self.kind}{number}{self._clip_name}{self._rule_name}"

    @property
    def _clip_name(self) -> str:
        clips = (self.rho_clip, self.c_clip)
        if self.kind in UNCLIPPED or clips == (Method.rho_clip, Method.c_clip):
            return ""
        return f"@{self.c_clip:g}" if self.rho_clip == self.c_clip else f"@{self.rho_clip:g}/{self.c_clip:g}"

    @property
    def _rule_name(self) -> str:
        if self.rule == "ppo" and not self.rule_options:
            return ""
        options = (f":{key}={x:g}" if isinstance(x, float) else f":{key}={x}" for key, x in self.rule_options)
        return f"+{self.rule}{''.join(options)}"

    @property
    def window(self) -> int:
        """Policy tokens, for the kinds whose parameter is one."""
        return int(self.parameter)


def parse_method(text: str, *, rho_clip: float = 1.2, c_clip: float = 1.1) -> Method:
    """``NAME[:NUMBER][@CLIP or @RHO/C][+RULE[:OPTION=VALUE]...]`` to a :class:`Method`; one clip is both.

    Raises:
        BraceError: an unknown name, or a number outside its range.
    """
    target, plus, rule = text.strip().partition("+")
    method = _parse_target(target, rho_clip=rho_clip, c_clip=c_clip)
    return _with_rule(method, text, rule) if plus else method


def _with_rule(method: Method, text: str, rule: str) -> Method:
    name, *settings = rule.split(":")
    if name not in RULE_OPTIONS:
        raise BraceError(f"method {text!r}: no actor rule {name!r}; choose from {', '.join(RULE_OPTIONS)}")
    if name in WHOLE_BATCH_RULES:
        raise BraceError(f"method {text!r}: {name} decides by the batch of one run; here all seeds share a batch")
    options: dict[str, float | str] = {}
    for setting in settings:
        key, equals, word = setting.partition("=")
        if not equals:
            raise BraceError(f"method {text!r}: {setting!r} is no option; write it as NAME=VALUE")
        try:
            options[key] = float(word)
        except ValueError:
            options[key] = word
    # The average's decay may follow from the lag, which is not known here.
    implied = {"beta": 0.0} if name == "ppo_ewma" else {}
    model = RULE_OPTIONS[name]
    try:
        model(**(implied | options))
    except ValidationError as error:
        problem = first_problem(error, prefix=name, known=lambda _: list(model.model_fields))
        raise BraceError(f"method {text!r}: {problem}") from error
    return replace(method, rule=name, rule_options=tuple(options.items()))


def _parse_target(text: str, *, rho_clip: float, c_clip: float) -> Method:
    named, at, clip = text.partition("@")
    kind, colon, number = named.partition(":")
    if kind not in PARAMETERS:
        raise BraceError(f"method {text!r}: unknown; choose from {', '.join(PARAMETERS)}")
    if at:
        if kind in UNCLIPPED:
            raise BraceError(f"method {text!r}: {kind} takes no clip")
        first, _, second = clip.partition("/")
        rho_clip, c_clip = (_number(text, word, "CLIP") for word in (first, second or first))
        if not min(rho_clip, c_clip) > 0:
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
    whole = (value >= 0 and value % 1 == 0, "the window must be a whole number of tokens, 0 or more")
    fits = {
        "gae": (0 <= value <= 1, "lambda must be between 0 and 1"),
        "capped": whole,
        "brace": whole,
        "group_brace": whole,
        "drift": (0 < value < 1, "eps must be between 0 and 1"),
        "path": (value >= 0, "the budget must be at least 0"),
    }
    fit, rule = fits[kind]
    if not fit:
        raise BraceError(f"method {text!r}: {rule}")
