"""Responses cut into states: which tokens, which finished turns, which part of an unfinished one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from brace_rl.errors import DataError
from brace_rl.probe.options import Positions
from brace_rl.tasks.base import Problem, Task
from brace_rl.training.engines.stopping import StopRule

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Response:
    """A response to be cut; lists have one entry per response token, tool output included."""

    problem: Problem
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    policy_mask: tuple[bool, ...]


@dataclass(frozen=True)
class State:
    """What stands before one policy token.

    Attributes:
        response: index of the response it was cut from.
        position: index among the positions asked for.
        token: policy tokens written before it.
        cut: response tokens before it, tool output included.
        context: prompt and response up to the turn the cut lies in.
        written: what that turn holds already; empty where the turn is about to begin.
        actions: text of the turns finished before, in order, for the environment.
        tokens_left: response tokens that still fit, from the beginning of the turn.
    """

    problem: Problem
    response: int
    position: int
    token: int
    cut: int
    context: tuple[int, ...]
    written: tuple[int, ...]
    actions: tuple[str, ...]
    tokens_left: int


class Turns:
    """Tells where turns end and what they say, from token ids alone, exactly as when they were generated."""

    def __init__(self, task: Task, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.stop = task.stop
        self._end_ids = () if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),)
        self._rule = StopRule(tokenizer, task.stop, self._end_ids)

    def ends(self, turn: Sequence[int]) -> bool:
        """Whether the last of these tokens ends the turn they begin."""
        return self._rule.ends(turn)

    def text(self, turn: Sequence[int]) -> str:
        """The turn as the environment hears it: without the end-of-sequence token that may close it."""
        if turn and turn[-1] in self._end_ids:
            turn = turn[:-1]
        return self.decode(turn)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Token ids as text, special tokens kept."""
        return str(
            self.tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        )

    def spans(self, response: Response) -> list[tuple[int, int]]:
        """``[start, end)`` of every turn among the response tokens.

        Tool output ends a turn, and so does a stop, because an observation may be empty.
        """
        found: list[tuple[int, int]] = []
        turn: list[int] = []
        following = (*response.policy_mask[1:], False)
        for index, is_policy in enumerate(response.policy_mask):
            if not is_policy:
                continue
            turn.append(response.response_ids[index])
            if not following[index] or self.ends(turn):
                found.append((index + 1 - len(turn), index + 1))
                turn = []
        return found


def cut_responses(
    responses: Sequence[Response], positions: Positions, turns: Turns, *, max_response_tokens: int
) -> list[State]:
    """The states at ``positions`` of every response that is long enough, in order of response, then of position.

    Raises:
        DataError: a position that no response reaches.
    """
    states: list[State] = []
    for index, response in enumerate(responses):
        places = [i for i, is_policy in enumerate(response.policy_mask) if is_policy]
        spans = turns.spans(response)
        for position, place in enumerate(positions.places):
            token = positions.token(place, len(places))
            if token is None or places[token] >= max_response_tokens:
                continue
            states.append(_state(response, index, position, token, places[token], spans, turns, max_response_tokens))
    reached = {state.position for state in states}
    for position in range(len(positions.places)):
        if position not in reached:
            longest = max(sum(response.policy_mask) for response in responses)
            raise DataError(
                f"--at: no response has a policy token {positions.label(position)} (counted from 0); the longest has "
                f"{longest}"
            )
    return states


def _state(
    response: Response,
    index: int,
    position: int,
    token: int,
    cut: int,
    spans: Sequence[tuple[int, int]],
    turns: Turns,
    max_response_tokens: int,
) -> State:
    start = next(begin for begin, end in spans if begin <= cut < end)
    return State(
        problem=response.problem,
        response=index,
        position=position,
        token=token,
        cut=cut,
        context=(*response.prompt_ids, *response.response_ids[:start]),
        written=response.response_ids[start:cut],
        actions=tuple(turns.text(response.response_ids[begin:end]) for begin, end in spans if end <= start),
        tokens_left=max_response_tokens - start,
    )
