import json
import random

import numpy as np
import pytest
import torch

from brace_rl.training.random_state import random_state, restore_random_state


def draws():
    return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.randn(3).tolist()]


def test_after_a_trip_through_json_the_same_numbers_are_drawn():
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    draws()  # leaves half a Gaussian pair in Python's and in NumPy's generator
    saved = json.loads(json.dumps(random_state()))
    first = draws()
    draws()
    restore_random_state(saved)
    assert draws() == first


def test_taking_the_state_draws_nothing():
    assert random_state() == random_state()


def test_a_damaged_state_is_refused():
    with pytest.raises((KeyError, TypeError, ValueError, RuntimeError)):
        restore_random_state({**random_state(), "torch_cpu": "00"})


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_gpu_goes_on_drawing_where_it_was():
    torch.randn(1, device="cuda")
    saved = json.loads(json.dumps(random_state()))
    first = torch.randn(3, device="cuda")
    restore_random_state(saved)
    assert torch.equal(torch.randn(3, device="cuda"), first)
