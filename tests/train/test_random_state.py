"""What a rank draws after a resume is what it would have drawn."""

import random

import numpy as np
import torch

from miles.train import random_state


def draws():
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_a_rank_goes_on_where_it_was(tmp_path):
    random_state.save(str(tmp_path), 1)
    expected = draws()
    draws()
    assert random_state.load(str(tmp_path), 1)
    assert draws() == expected


def test_a_rank_that_was_not_there_keeps_its_own(tmp_path):
    random_state.save(str(tmp_path), 0)
    before = torch.get_rng_state()
    assert not random_state.load(str(tmp_path), 1)
    assert torch.equal(torch.get_rng_state(), before)
