"""The loss of an optimizer step has one normalisation, whatever it is cut into."""

import numpy as np
import pytest

from miles.errors import TrainerError
from miles.train.normalisation import token_weights


def test_token_mean_and_sample_mean_of_a_short_and_a_long_sample():
    """Losses of 1 on two tokens and 0 on eight: 0.2 by token, 0.5 by sample (verl#5625)."""
    losses = [np.ones(2), np.zeros(8)]
    by_token = token_weights([2, 8], per_token=True)
    by_sample = token_weights([2, 8], per_token=False)
    assert sum(w * x.sum() for w, x in zip(by_token, losses, strict=True)) == pytest.approx(0.2)
    assert sum(w * x.sum() for w, x in zip(by_sample, losses, strict=True)) == pytest.approx(0.5)


def test_sample_with_nothing_to_train_still_counts_as_a_sample():
    assert token_weights([4, 0], per_token=False).tolist() == [1 / 8, 0.0]
    assert token_weights([4, 0], per_token=True)[0] == 1 / 4


@pytest.mark.parametrize("per_token", [True, False])
def test_step_with_nothing_to_train_is_an_error(per_token):
    with pytest.raises(TrainerError, match="nothing to train: the loss masks of all 2 samples"):
        token_weights([0, 0], per_token=per_token)


@pytest.mark.parametrize("per_token", [True, False])
def test_weights_of_all_trained_tokens_add_up_to_one(per_token):
    counts = [3, 1, 7, 2]
    assert np.dot(token_weights(counts, per_token=per_token), counts) == pytest.approx(1.0)
