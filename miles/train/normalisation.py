"""Trained tokens per sample in, the weight of each token out: the loss of an optimizer step is then one plain sum.

Because a weight depends on the whole optimizer step and on nothing else, neither micro-batches nor ranks nor padding can
change loss or gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from miles.errors import TrainerError


def token_weights(trained_tokens: Sequence[int], *, per_token: bool) -> npt.NDArray[np.float64]:
    """Weight of every trained token of each sample of an optimizer step, [samples].

    Default: mean over samples of the mean over a sample's tokens, where a sample with nothing to train counts as 0.
    ``per_token``: mean over all tokens. Raises `TrainerError` where no sample has anything to train.
    """
    count = np.asarray(trained_tokens, dtype=np.float64)
    if not count.sum():
        raise TrainerError(
            f"nothing to train: the loss masks of all {len(count)} samples of the optimizer step are 0 everywhere; "
            "look at the loss_mask that the generate function or the chat template returns"
        )
    if per_token:
        return np.full(len(count), 1.0 / count.sum())
    return np.where(count > 0, 1.0 / (np.maximum(count, 1) * len(count)), 0.0)
