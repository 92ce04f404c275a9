"""Groups in, the columns that the trainer reads out: numpy per sample, in the contract's names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from miles.errors import TrainerError
from miles.types import FinishedGroup, Sample, iter_samples

RolloutBatch = dict[str, Any]


def to_train_data(
    groups: Sequence[FinishedGroup],
    reward_key: str | None,
    rewards: Sequence[float | None] | None = None,
    *,
    log_probs: bool = True,
) -> RolloutBatch:
    """Columns with one entry per sample; samples of a group are contiguous and share a ``group_ids`` entry.

    tokens int32 [prompt + response], loss_masks uint8 [response], rollout_log_probs float32 [response], raw_reward
    float or None, metadata (``train_metadata``), and, where they are given, the rewards of a post-process hook, which are
    trained as they are. ``log_probs``: whether samples need the engine's; where not, None stands for missing ones. Raises
    `TrainerError` naming the sample whose arrays don't fit together, `RewardFailed` for a reward that holds no number.
    """
    batch: RolloutBatch = {name: [] for name in _COLUMNS}
    for group in groups:
        for sample in iter_samples(group.samples):
            if log_probs and sample.rollout_log_probs is None:
                raise TrainerError(
                    f"sample {sample.index} has no rollout_log_probs: a generate function must fill them in, "
                    "one per response token"
                )
            for name, value in _row(sample, reward_key).items():
                batch[name].append(value)
            batch["group_ids"].append(group.issue_id)
    if rewards is not None:
        batch["rewards"] = list(rewards)
    return batch


_COLUMNS = (
    "tokens", "response_lengths", "loss_masks", "rollout_log_probs", "raw_reward", "truncated", "sample_indices",
    "rollout_ids", "group_ids", "metadata",
)  # fmt: skip


def _row(sample: Sample, reward_key: str | None) -> dict[str, Any]:
    try:
        sample.validate()
    except ValueError as error:
        raise TrainerError(f"sample {sample.index}: {error}") from error
    length = sample.response_length
    given = sample.rollout_log_probs
    mask = np.ones(length, np.uint8) if sample.loss_mask is None else np.asarray(sample.loss_mask, np.uint8)
    return {
        "tokens": np.asarray(sample.tokens, np.int32),
        "response_lengths": length,
        "loss_masks": np.zeros_like(mask) if sample.remove_sample else mask,
        "rollout_log_probs": None if given is None else np.asarray(given, np.float32),
        "raw_reward": sample.reward_value(reward_key),
        "truncated": int(sample.status is Sample.Status.TRUNCATED),
        "sample_indices": sample.index,
        "rollout_ids": sample.index if sample.rollout_id is None else sample.rollout_id,
        "metadata": sample.train_metadata,
    }
