"""A task of two turns over four tokens, models small enough to enumerate, and an engine that says a fixed text."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from brace_rl.config import config_from_dict
from brace_rl.tasks.base import Environment, Problem, StepResult, Task
from brace_rl.training.engines.base import Engine
from brace_rl.training.engines.stopping import StopRule
from brace_rl.training.models import Critic
from brace_rl.training.types import Generation

LIMIT = 6
"""Response tokens, small enough to enumerate."""


def character_tokenizer(characters: str) -> PreTrainedTokenizerFast:
    """One token per character; id 0 is the end of sequence."""
    words = ["<eos>", *characters]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<eos>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<eos>")


LETTERS = character_tokenizer("abc")
_ID_OF = {letter: LETTERS.convert_tokens_to_ids(letter) for letter in "abc"}
_LETTER_OF = {token: letter for letter, token in _ID_OF.items()}


def tiny_model(seed: int, vocabulary: int = len(LETTERS)) -> LlamaForCausalLM:
    """Random, and far from uniform."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=64,
        initializer_range=0.35,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval()


def shifted(model: LlamaForCausalLM, amount: float) -> LlamaForCausalLM:
    """A policy some way off ``model``."""
    torch.manual_seed(99)
    other = LlamaForCausalLM(model.config).eval()
    with torch.no_grad():
        for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
            mine.copy_(theirs + amount * torch.randn_like(theirs))
    return other


def tiny_critic(seed: int = 5) -> Critic:
    critic = Critic.from_actor(tiny_model(seed))
    torch.nn.init.normal_(critic.head.weight)
    return critic.eval()


def answer(turns: Sequence[str]) -> StepResult:
    """What the environment says to the last of the turns so far: ``c`` to the first; the second ends the episode."""
    count = sum(turn.count("a") for turn in turns)
    if len(turns) == 1:
        return StepResult(observation="c", reward=0.5 * (count == 1))
    return StepResult(reward=float(count >= 2), done=True, success=count >= 2)


class LettersEnvironment(Environment):
    def __init__(self, heard: list[tuple[str, ...]]) -> None:
        self.turns: list[str] = []
        self._heard = heard

    async def step(self, action: str) -> StepResult:
        self.turns.append(action)
        result = answer(self.turns)
        if result.done:
            self._heard.append(tuple(self.turns))
        return result


class LettersTask(Task):
    """A turn ends with ``b``; ``heard`` holds the turns of every finished episode."""

    stop = ("b",)

    def __init__(self, problems: int = 24) -> None:
        self.heard: list[tuple[str, ...]] = []
        prompts = ["".join(letters) for letters in itertools.product("abc", repeat=3)][:problems]
        self._problems = [Problem(id=f"p/{prompt}", prompt=prompt, answer="") for prompt in prompts]

    def train_problems(self):
        return self._problems

    def eval_problems(self):
        return self._problems

    def environment(self, problem):
        return LettersEnvironment(self.heard)


def letters_config(**sections):
    rollout = {"max_response_tokens": LIMIT, "max_prompt_tokens": 8}
    return config_from_dict({"rollout": rollout, "eval": {"slots": 64}, **sections})


class ExactValues:
    """``V(s)`` of a policy in :class:`LettersTask`, by enumeration of everything it could write."""

    def __init__(self, model: LlamaForCausalLM, *, gamma: float = 1.0) -> None:
        self._model = model
        self._gamma = gamma
        self._prompt: tuple[int, ...] = ()
        self._table = torch.empty(0)

    def _read(self, prompt: tuple[int, ...]) -> None:
        """The policy after every sequence that may follow ``prompt``, from one forward."""
        if prompt == self._prompt:
            return
        every = torch.cartesian_prod(*[torch.arange(len(LETTERS))] * (LIMIT - 1))
        ids = torch.cat([torch.tensor(prompt).expand(len(every), -1), every], 1)
        with torch.no_grad():
            logits = self._model(input_ids=ids, use_cache=False).logits
        self._prompt, self._table = prompt, logits.double().softmax(-1)

    def _probabilities(self, ids: tuple[int, ...]) -> list[float]:
        after = ids[len(self._prompt) :]
        row = sum(token * len(LETTERS) ** (LIMIT - 2 - place) for place, token in enumerate(after))
        return self._table[row, len(ids) - 1].tolist()

    def value(self, prompt: tuple[int, ...], response: tuple[int, ...], mask: tuple[bool, ...]) -> float:
        """Of the state after ``response``, whose tool output ``mask`` marks."""
        self._read(prompt)
        turns, written = [], []
        for token, is_policy in zip(response, mask, strict=True):
            if not is_policy:
                continue
            written.append(token)
            if self._ends(token):
                turns.append(self._text(written))
                written = []
        return self._value(prompt + response, tuple(written), tuple(turns), LIMIT - len(response))

    def _value(self, ids, written, turns, left) -> float:
        total = 0.0
        for token, probability in enumerate(self._probabilities(ids)):
            after = (*written, token)
            if not self._ends(token):
                later = self._value((*ids, token), after, turns, left - 1) if left > 1 else 0.0
                total += probability * self._gamma * later
                continue
            taken = (*turns, self._text(after))
            result = answer(taken)
            observed = [_ID_OF[letter] for letter in result.observation]
            goes_on = not result.done and len(observed) < left - 1
            later = self._value((*ids, token, *observed), (), taken, left - 1 - len(observed)) if goes_on else 0.0
            total += probability * (result.reward + self._gamma * later)
        return total

    @staticmethod
    def _ends(token: int) -> bool:
        return token in (0, _ID_OF["b"])

    @staticmethod
    def _text(written: Sequence[int]) -> str:
        return "".join(_LETTER_OF.get(token, "") for token in written)


class ScriptEngine(Engine):
    """Goes on with the one text it knows, whatever part of it is there already. Looks for stops as engines do: in what
    it has written for the request at hand."""

    def __init__(self, script: Sequence[int], tokenizer) -> None:
        self.version = 0
        self.requests = []
        self._script = tuple(script)
        self._tokenizer = tokenizer
        self._waiting = []

    def submit(self, requests) -> None:
        for request in requests:
            assert request.token_ids == self._script[: len(request.token_ids)]
        self.requests += requests
        self._waiting += requests

    def step(self):
        finished = [self._generation(request) for request in self._waiting]
        self._waiting = []
        return finished

    def _generation(self, request):
        rule = StopRule(self._tokenizer, request.stop, request.stop_token_ids)
        generation = Generation(request.session)
        for token in self._script[len(request.token_ids) :][: request.max_new_tokens]:
            generation.token_ids.append(token)
            if rule.ends(generation.token_ids):
                generation.finish_reason = "stop"
                break
        count = len(generation.token_ids)
        generation.logprobs, generation.entropies, generation.versions = [0.0] * count, [0.0] * count, [0] * count
        return generation

    def update_weights(self, weights, version) -> None:
        self.version = version

    def release(self, session) -> None:
        pass

    @property
    def unfinished(self) -> int:
        return len(self._waiting)


def pooled_z(estimates, exact, noise) -> float:
    """Standard errors between the sums of unbiased estimates and of what they estimate."""
    return float((estimates - exact).sum() / math.sqrt(noise.sum()))
