"""Rewards and group ids in, advantages out: pure, float64, by group id and never by position.

rewards ──▶ estimate (per rollout) ──▶ token_advantages (KL penalty, returns) ──▶ whiten (over the training step)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from miles.config.owners import TrainSettings

STD_EPSILON = 1e-6
VARIANCE_EPSILON = 1e-8
BASELINED = ("grpo", "gspo", "reinforce_plus_plus_baseline")
"""Estimators whose rewards are relative to their group."""
SCALED = ("grpo", "gspo")
"""Those that may divide by the deviation of the group."""
PENALISED = ("reinforce_plus_plus", "reinforce_plus_plus_baseline")
"""Estimators with a KL penalty in their advantages."""


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


def are_read(train: TrainSettings) -> bool:
    """Whether the loss reads advantages at all."""
    return train.compute_advantages_and_returns and train.loss_type != "sft_loss"


def estimate(
    rewards: Sequence[float | None], group_ids: Sequence[int], train: TrainSettings
) -> npt.NDArray[np.float64]:
    """The advantages of ``--advantage-estimator`` before what depends on tokens, one per rollout."""
    if train.advantage_estimator not in BASELINED or not train.rewards_normalization:
        return plain_advantages(rewards)
    scaled = train.advantage_estimator in SCALED and train.grpo_std_normalization
    return grpo_advantages(rewards, group_ids, std_normalization=scaled)


def token_advantages(advantage: float, kl_A: npt.NDArray[np.float64], train: TrainSettings) -> npt.NDArray[np.float64]:
    """Advantages of the A trained tokens of one sample, from the KL to the reference at each of them.

    ``reinforce_plus_plus``: the discounted sum of what follows, -kl_coef * kl at each token and the reward at the last one;
    masked tokens are no time steps. The others: the advantage - kl_coef * kl of the token itself. Source: Hu et al. 2025,
    "REINFORCE++" (arXiv 2501.03262), with and without a group baseline.
    """
    penalised = train.advantage_estimator in PENALISED
    rewards_A = -train.kl_coef * kl_A if penalised else np.zeros(len(kl_A))
    if train.advantage_estimator != "reinforce_plus_plus":
        return rewards_A + advantage
    rewards_A[-1:] += advantage
    returns_A, following = np.empty(len(rewards_A)), 0.0
    for t in reversed(range(len(rewards_A))):
        returns_A[t] = following = rewards_A[t] + train.gamma * following
    return returns_A


def whiten(
    samples: Sequence[npt.NDArray[np.float64]], sum_over_ranks: Callable[[npt.NDArray[np.float64]], Any]
) -> list[npt.NDArray[np.float64]]:
    """Mean 0 and variance 1 over all tokens of all samples of all ranks; where all are equal, all are 0.

    ``sum_over_ranks`` adds up a small vector over the ranks, each of which gives its own samples. The variance is that of
    the population, plus 1e-8, as in OpenRLHF's REINFORCE++.
    """
    own = np.concatenate([np.zeros(0), *samples])
    total, count = sum_over_ranks(np.array([own.sum(), len(own)]))
    mean = total / max(count, 1)
    [squares] = sum_over_ranks(np.array([((own - mean) ** 2).sum()]))
    return [(values - mean) / np.sqrt(squares / max(count, 1) + VARIANCE_EPSILON) for values in samples]
