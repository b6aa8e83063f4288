"""From what an environment says to tokens: text, chat messages, cutting."""

from __future__ import annotations

from typing import Any

import pytest
from fakes import FakeTokenizer

from brace_rl.errors import ModelError
from brace_rl.tasks.base import StepResult
from brace_rl.training.observations import observation_ids

TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{{ '\x00' if m['role'] == 'assistant' else '' }}\n"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def chat_tokenizer(template: str | None = TEMPLATE) -> Any:
    """One token per character; the end of sequence is the character 0."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({chr(code): code for code in range(128)}, unk_token="\x01"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="\x00")
    fast.chat_template = template
    return fast


def text_of(result: StepResult, *, last_token: int = 0, most_tokens: int = 0) -> tuple[str, bool]:
    ids, cut = observation_ids(result, chat_tokenizer(), last_token=last_token, most_tokens=most_tokens)
    return "".join(map(chr, ids)), cut


def test_text_goes_in_as_it_is() -> None:
    ids, cut = observation_ids(StepResult("<tag>12", observation_end=";"), FakeTokenizer(), last_token=5)  # type: ignore[arg-type]
    assert (ids, cut) == ([1, ord("1"), ord("2"), ord(";")], False)


@pytest.mark.parametrize("observation", ["a\ud800b", ({"role": "tool", "content": "a\ud800b"},)])
def test_text_that_cannot_be_written_loses_what_cannot(observation: Any) -> None:
    assert "a?b" in text_of(StepResult(observation))[0]


def test_messages_get_the_models_markers_and_open_the_next_turn() -> None:
    result = StepResult(({"role": "tool", "content": "42"}, {"role": "user", "content": "go on"}))
    assert text_of(result) == ("\n[tool]42\n[user]go on\n[assistant]", False)


def test_a_turn_that_did_not_end_itself_is_ended_by_the_observation() -> None:
    result = StepResult(({"role": "user", "content": "go on"},))
    assert text_of(result, last_token=ord("x"))[0] == "\x00\n[user]go on\n[assistant]"


def test_messages_lose_the_end_of_the_last_ones_content() -> None:
    result = StepResult(({"role": "user", "content": "0123456789"},))
    whole = text_of(result)[0]
    text, cut = text_of(result, most_tokens=len(whole) - 4)
    assert (text, cut) == ("\n[user]012345\n[assistant]", True)


@pytest.mark.parametrize("most", [1, 3])
def test_a_limit_too_small_for_the_markers_keeps_them_all_the_same(most: int) -> None:
    assert text_of(StepResult("123", observation_end=";;;;"), most_tokens=most) == (";;;;", True)


def test_a_model_without_template_cannot_take_messages() -> None:
    result = StepResult(({"role": "user", "content": "x"},))
    with pytest.raises(ModelError, match="has no chat template"):
        observation_ids(result, chat_tokenizer(None), last_token=0)


def test_a_template_that_refuses_the_messages_is_the_clear_error() -> None:
    refuses = "{% if messages[-1]['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    with pytest.raises(ModelError, match="its chat template refuses an observation: no tools"):
        observation_ids(StepResult(({"role": "tool", "content": "x"},)), chat_tokenizer(refuses), last_token=0)
