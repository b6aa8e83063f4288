"""Cuts in the middle of turns: what was written counts as part of the turn, and stop texts may straddle a cut."""

from __future__ import annotations

import pytest
from probe_parts import ScriptEngine, character_tokenizer, letters_config

from brace_rl.config import config_from_dict
from brace_rl.errors import BraceError
from brace_rl.probe.continuations import play_on
from brace_rl.probe.options import Positions, even_positions, parse_positions
from brace_rl.probe.replay import check_replay
from brace_rl.probe.states import Response, Turns, cut_responses
from brace_rl.tasks import build_task
from brace_rl.tasks.tokenizer import build_calculator_tokenizer

PIECES = (
    ("<calc>3+4</calc>", True),
    ("<result>7</result>", False),
    ("<calc>7*2</calc>", True),
    ("<result>14</result>", False),
    ("<answer>14</answer>", True),
)
CONFIG = config_from_dict({"rollout": {"max_response_tokens": 128}})


@pytest.fixture(scope="module")
def task():
    config = config_from_dict({"task": {"train_problems": 20, "eval_problems": 20}})
    return build_task(config.task, config.warm_start, 0)


def tokenizers():
    return {
        "tags": build_calculator_tokenizer(),  # a stop text is one token
        "characters": character_tokenizer("0123456789+-*/()=. <>acelnrstuwo"),  # and here seven or nine
    }


def recorded(task, tokenizer, pieces=PIECES, prompt="(3+4)*2="):
    problem = next(p for p in task.eval_problems())
    problem = type(problem)(id="calculator/(3+4)*2", prompt=prompt, answer="14", metadata=problem.metadata)
    ids, mask = [], []
    for text, is_policy in pieces:
        tokens = tokenizer.encode(text, add_special_tokens=False)
        ids += tokens
        mask += [is_policy] * len(tokens)
    return Response(problem, tuple(task.prompt_ids(problem, tokenizer)), tuple(ids), tuple(mask))


@pytest.mark.parametrize("kind", ["tags", "characters"])
def test_from_every_token_on_the_calculator_episode_ends_as_it_did(task, kind):
    tokenizer = tokenizers()[kind]
    response = recorded(task, tokenizer)
    check_replay([response], task=task, tokenizer=tokenizer, config=CONFIG)
    engine = ScriptEngine((*response.prompt_ids, *response.response_ids), tokenizer)
    tokens = sum(response.policy_mask)
    where = Positions(tuple(float(i) for i in range(tokens)), are_shares=False)
    states = cut_responses([response], where, Turns(task, tokenizer), max_response_tokens=128)
    assert len(states) == tokens
    found = play_on(states, engine=engine, task=task, tokenizer=tokenizer, config=CONFIG, samples=2, seed=0)
    assert (found.returns == 1).all()
    assert not found.truncated.any()
    assert not found.failed.any()


def test_the_turns_before_a_cut_are_those_the_policy_took(task):
    tokenizer = build_calculator_tokenizer()
    response = recorded(task, tokenizer)
    # One policy token into the answer: "<answer>" is written, two calls are answered.
    calls = sum(len(tokenizer.encode(text, add_special_tokens=False)) for text, is_policy in PIECES[:-1] if is_policy)
    where = Positions((float(calls), float(calls + 1)), are_shares=False)
    fresh, inside = cut_responses([response], where, Turns(task, tokenizer), max_response_tokens=128)
    assert fresh.actions == inside.actions == ("<calc>3+4</calc>", "<calc>7*2</calc>")
    assert (fresh.written, tokenizer.decode(inside.written)) == ((), "<answer>")
    everything_before = "".join(text for text, _ in PIECES[:-1])
    assert tokenizer.decode(fresh.context) == "(3+4)*2=" + everything_before
    assert inside.context == fresh.context
    assert (*inside.context, *inside.written) == (*response.prompt_ids, *response.response_ids)[
        : len(response.prompt_ids) + inside.cut
    ]


def test_single_tokens_are_asked_for_only_while_a_stop_text_may_straddle_the_cut(task):
    tokenizer = tokenizers()["characters"]
    response = recorded(task, tokenizer)
    engine = ScriptEngine((*response.prompt_ids, *response.response_ids), tokenizer)
    where = Positions((7.0, 11.0), are_shares=False)  # after "<calc>3", and after "<calc>3+4</"
    states = cut_responses([response], where, Turns(task, tokenizer), max_response_tokens=128)
    assert [tokenizer.decode(state.written) for state in states] == ["<calc>3", "<calc>3+4</"]
    play_on(states, engine=engine, task=task, tokenizer=tokenizer, config=CONFIG, samples=1, seed=0)
    single = [r for r in engine.requests if r.max_new_tokens == 1]
    assert len(single) == len("calc>")


def test_a_stop_of_the_policy_ends_a_turn_even_where_the_observation_is_empty():
    class Silent:
        stop = (";",)

    tokenizer = character_tokenizer("ab;")
    ids = tuple(tokenizer.encode("ab;a;b", add_special_tokens=False))
    response = Response(None, (1,), ids, (True,) * len(ids))
    assert Turns(Silent(), tokenizer).spans(response) == [(0, 3), (3, 5), (5, 6)]


def test_a_changed_observation_is_found_on_replay(task):
    tokenizer = build_calculator_tokenizer()
    changed = (*PIECES[:3], ("<result>15</result>", False), PIECES[4])
    with pytest.raises(BraceError, match=r"\(3\+4\)\*2: replaying its turns gave another observation, or ended, after"):
        check_replay([recorded(task, tokenizer, changed)], task=task, tokenizer=tokenizer, config=CONFIG)


def test_the_length_limit_counts_what_was_written_before_the_cut(task):
    """The limit that cut the response cuts its continuations at the same token."""
    tokenizer = build_calculator_tokenizer()
    response = recorded(task, tokenizer)
    limit = len(response.response_ids) - 1
    config = letters_config(rollout={"max_response_tokens": limit})
    engine = ScriptEngine((*response.prompt_ids, *response.response_ids), tokenizer)
    where = Positions((0.0, 3.0, 8.0), are_shares=False)
    states = cut_responses([response], where, Turns(task, tokenizer), max_response_tokens=limit)
    found = play_on(states, engine=engine, task=task, tokenizer=tokenizer, config=config, samples=1, seed=0)
    assert found.truncated.all()
    assert (found.returns == 0).all()


@pytest.mark.parametrize(
    ("text", "places", "are_shares"),
    [("0,16,4", (0, 4, 16), False), ("0.5, 0", (0, 0.5), True), ("0", (0,), False), ("0.", (0,), True)],
)
def test_positions_are_shares_where_there_is_a_point(text, places, are_shares):
    assert parse_positions(text) == Positions(tuple(map(float, places)), are_shares)


def test_places_are_floors_of_shares():
    assert [even_positions(4).token(place, 7) for place in even_positions(4).places] == [0, 1, 3, 5]
    assert Positions((7.0,), are_shares=False).token(7.0, 7) is None


@pytest.mark.parametrize("text", ["1.0", "-0.1", "-1", "a", "", "0.5,nan", "3,4.5"])
def test_positions_out_of_range_are_refused(text):
    with pytest.raises(BraceError, match=r"^--at: "):
        parse_positions(text)
