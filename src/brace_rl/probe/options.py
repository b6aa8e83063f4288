"""What a probe is asked for."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from brace_rl.errors import DataError

FEWEST_CONTINUATIONS = 2
"""From one continuation its noise cannot be told from the spread of the states."""


@dataclass(frozen=True)
class Positions:
    """Where responses are cut: before the policy tokens at these places, counted from 0 among policy tokens alone.

    Attributes:
        places: ascending; shares of the response's policy tokens in [0, 1), or numbers of policy tokens written.
        are_shares: which of the two.
    """

    places: tuple[float, ...]
    are_shares: bool

    def token(self, place: float, policy_tokens: int) -> int | None:
        """Policy tokens before the cut in a response of ``policy_tokens``; None where it is not that long."""
        token = math.floor(place * policy_tokens) if self.are_shares else int(place)
        return token if token < policy_tokens else None

    def label(self, index: int) -> str:
        """The place as text."""
        return f"{self.places[index]:.2f}" if self.are_shares else f"{self.places[index]:.0f}"


@dataclass(frozen=True)
class Options:
    """Options of ``brace probe``.

    Attributes:
        step: of pi's checkpoint; None: the newest.
        behavior_step: of mu's; None: chosen by :func:`brace_rl.probe.checkpoints.choose_pair`.
        prefixes: "fresh" responses of mu to held-out problems, or those of ``rollouts.jsonl``.
        prompts: responses cut, one to a prompt.
        continuations: per state and policy.
        device: in place of the run's; None: as the run was configured.
    """

    step: int | None = None
    behavior_step: int | None = None
    prefixes: Literal["fresh", "rollouts"] = "fresh"
    prompts: int = 32
    positions: Positions = Positions(tuple(i / 6 for i in range(6)), are_shares=True)
    continuations: int = 8
    seed: int = 0
    device: str | None = None

    def __post_init__(self) -> None:
        if self.prompts < 1:
            raise DataError("--prompts: must be at least 1")
        if self.continuations < FEWEST_CONTINUATIONS:
            raise DataError(f"--continuations: must be at least {FEWEST_CONTINUATIONS}, to know their noise")


def even_positions(count: int) -> Positions:
    """``count`` evenly spaced shares from 0.

    Raises:
        DataError: fewer than one.
    """
    if count < 1:
        raise DataError("--positions: must be at least 1")
    return Positions(tuple(i / count for i in range(count)), are_shares=True)


def parse_positions(text: str) -> Positions:
    """``0,16,64`` are policy tokens written, ``0,0.25,0.5`` shares of the response's.

    Raises:
        DataError: not such a list, or out of range.
    """
    words = [word.strip() for word in text.split(",")]
    are_shares = any("." in word for word in words)
    try:
        places = [float(word) if are_shares else float(int(word)) for word in words]
    except ValueError:
        raise DataError(f"--at: {text!r} is no list of numbers such as 0,16,64 or 0,0.25,0.5") from None
    wrong = [place for place in places if not (0 <= place < 1 if are_shares else place >= 0)]
    if wrong:
        wanted = "at least 0 and below 1, shares of the response" if are_shares else "at least 0"
        raise DataError(f"--at: {wrong[0]:g} is out of range; positions must be {wanted}")
    return Positions(tuple(sorted(set(places))), are_shares)


def check_reachable(positions: Positions, max_response_tokens: int) -> None:
    """Refuse, before anything is sampled, a number of tokens that no response can have.

    Raises:
        DataError: names the position and the limit.
    """
    beyond = [place for place in positions.places if not positions.are_shares and place >= max_response_tokens]
    if beyond:
        raise DataError(
            f"--at: no response has a policy token {beyond[0]:.0f} (counted from 0): rollout.max_response_tokens is "
            f"{max_response_tokens}"
        )
