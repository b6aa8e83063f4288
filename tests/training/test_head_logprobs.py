"""Log-probs from hidden states: equal to those from whole logits, gradients included, in a fraction of the memory."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from brace_rl.training.head_logprobs import KeptSets, LogitForm, head_logprobs

TOKENS, WIDTH, VOCABULARY = 9, 6, 13

FORMS = {
    "plain": LogitForm(),
    "tempered": LogitForm(temperature=0.7),
    "scaled": LogitForm(temperature=0.7, scale=0.25),
    "soft cap": LogitForm(temperature=1.3, scale=2.0, soft_cap=3.0),
}


def problem(dtype=torch.float64, bias=True):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    tokens = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
    return draw(TOKENS, WIDTH), draw(VOCABULARY, WIDTH), draw(VOCABULARY) if bias else None, tokens


def kept_lists(tokens):
    return [[int(t), *((int(t) + 1 + i) % VOCABULARY for i in range(n % 4))] for n, t in enumerate(tokens)]


def from_whole_logits(hidden, weight, bias, tokens, form, kept=None):
    """The definition, on one tensor of logits."""
    logits = form.scale * torch.nn.functional.linear(hidden, weight, bias)
    if form.soft_cap is not None:
        logits = form.soft_cap * (logits / form.soft_cap).tanh()
    logits = logits / form.temperature
    entropies = torch.distributions.Categorical(logits=logits).entropy()
    if kept is not None:
        mask = torch.zeros_like(logits, dtype=torch.bool)
        for row, ids in enumerate(kept):
            mask[row, ids] = True
        logits = logits.masked_fill(~mask, float("-inf"))
    return logits.log_softmax(-1).gather(1, tokens[:, None]).squeeze(1), entropies


@pytest.mark.parametrize("rows_per_chunk", [1, 4, TOKENS])
@pytest.mark.parametrize("has_kept", [False, True])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_values_and_gradients_are_those_of_whole_logits(form, has_kept, rows_per_chunk, dtype):
    hidden, weight, bias, tokens = problem(dtype)
    kept = kept_lists(tokens) if has_kept else None
    weights = torch.linspace(-1, 2, TOKENS, dtype=dtype)
    expected, expected_entropies = from_whole_logits(hidden, weight, bias, tokens, form, kept)
    wanted = torch.autograd.grad((expected * weights).sum(), (hidden, weight, bias))
    actual, entropies = head_logprobs(
        hidden,
        weight,
        bias,
        tokens,
        form=form,
        kept=None if kept is None else KeptSets(kept, hidden.device),
        chunk_bytes=rows_per_chunk * VOCABULARY * weight.element_size(),
    )
    got = torch.autograd.grad((actual * weights).sum(), (hidden, weight, bias))
    tight = {"atol": 1e-12, "rtol": 1e-10} if dtype == torch.float64 else {"atol": 2e-6, "rtol": 2e-5}
    for a, b in zip((actual, entropies, *got), (expected, expected_entropies, *wanted), strict=True):
        torch.testing.assert_close(a, b, **tight)


def test_chunks_change_no_log_prob_beyond_rounding_and_no_token_gives_no_gradient():
    hidden, weight, _, tokens = problem(torch.float32, bias=False)
    one, _ = head_logprobs(hidden, weight, None, tokens, form=LogitForm())
    many, _ = head_logprobs(hidden, weight, None, tokens, form=LogitForm(), chunk_bytes=1)
    torch.testing.assert_close(one, many)
    none, _ = head_logprobs(hidden[:0], weight, None, tokens[:0], form=LogitForm())
    (gradient,) = torch.autograd.grad(none.sum(), weight)
    assert none.shape == (0,)
    assert not gradient.any()


def test_entropies_carry_no_gradient():
    hidden, weight, bias, tokens = problem()
    logprobs, entropies = head_logprobs(hidden, weight, bias, tokens, form=LogitForm())
    assert logprobs.requires_grad
    assert not entropies.requires_grad


def test_entropy_of_impossible_tokens_is_zero_not_nan():
    hidden, weight, tokens = torch.zeros(2, 3), torch.zeros(VOCABULARY, 3), torch.tensor([1, 2])
    bias = torch.zeros(VOCABULARY)
    bias[0] = float("-inf")
    _, entropies = head_logprobs(hidden, weight, bias, tokens, form=LogitForm())
    torch.testing.assert_close(entropies, torch.full((2,), math.log(VOCABULARY - 1)))


def test_under_autocast_products_are_bfloat16_and_the_rest_is_float32():
    hidden, weight, _, tokens = problem(torch.float32, bias=False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = torch.nn.functional.linear(hidden, weight)
        actual, entropies = head_logprobs(hidden, weight, None, tokens, form=LogitForm())
    expected = logits.float().log_softmax(-1).gather(1, tokens[:, None]).squeeze(1)
    assert (logits.dtype, actual.dtype, entropies.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    torch.testing.assert_close(actual, expected)
    wanted = torch.autograd.grad(expected.sum(), (hidden, weight))
    got = torch.autograd.grad(actual.sum(), (hidden, weight))
    for a, b in zip(got, wanted, strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, b, atol=2e-2, rtol=2e-2)


class LargestTensor(TorchDispatchMode):
    """Remembers the most elements any operation returned."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else (result,):
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.numel())
        return result


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_no_tensor_is_larger_than_one_chunk_of_logits(form):
    count, width, vocabulary, rows = 512, 4, 1000, 8
    hidden = torch.randn(count, width, requires_grad=True)
    weight = torch.randn(vocabulary, width, requires_grad=True)
    tokens = torch.arange(count) % vocabulary
    kept = KeptSets([[int(t)] for t in tokens], hidden.device)
    with LargestTensor() as largest:
        logprobs, _ = head_logprobs(
            hidden, weight, None, tokens, form=form, kept=kept, chunk_bytes=rows * vocabulary * 4
        )
        logprobs.sum().backward()
    assert largest.elements == rows * vocabulary
    assert rows * vocabulary < count * vocabulary / 50
