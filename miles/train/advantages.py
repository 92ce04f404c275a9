"""Rewards and group ids in, one advantage per sample out: pure, float64, by group id and never by position."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

STD_EPSILON = 1e-6


def plain_advantages(rewards: Sequence[float | None]) -> npt.NDArray[np.float64]:
    """Rewards as advantages, [samples]; an unscored sample (None) has advantage 0."""
    return np.array([0.0 if r is None else r for r in rewards], dtype=np.float64)


def grpo_advantages(
    rewards: Sequence[float | None], group_ids: Sequence[int], *, std_normalization: bool
) -> npt.NDArray[np.float64]:
    """Rewards relative to the mean of their group, [samples]; with ``std_normalization`` over their standard deviation.

    The baseline is that of the scored samples: an unscored one (None) is left out of it and has advantage 0. The
    deviation is the unbiased one (n - 1) plus 1e-6; where it is 0, as in a group of one, advantages are 0. Rewards are
    finite or None. Source: Shao et al. 2024, DeepSeekMath, 4.1.2.
    """
    values = plain_advantages(rewards)
    scored = np.array([r is not None for r in rewards], dtype=bool)
    _, group = np.unique(np.asarray(group_ids), return_inverse=True)
    count = np.bincount(group, weights=scored)
    mean = np.bincount(group, weights=values) / np.maximum(count, 1)
    advantages = np.where(scored, values - mean[group], 0.0)
    if not std_normalization:
        return advantages
    variance = np.bincount(group, weights=advantages**2) / np.maximum(count - 1, 1)
    scale = np.where(variance > 0, np.sqrt(variance) + STD_EPSILON, 1.0)
    return advantages / scale[group]
