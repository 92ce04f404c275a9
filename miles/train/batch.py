"""The columns of a batch in, checked samples per optimizer step out, and from those the tensors of a micro-batch.

A `TrainSample` keeps the positions of its trained tokens (loss mask 1); everything after the last of them is never read,
which by causality changes nothing. A sample with nothing to train is counted in the normalisation and then left out. A
user's own loss gets whole responses: the logits of all their tokens.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from miles.config.owners import TrainSettings
from miles.errors import TrainerError
from miles.train.advantages import are_read, estimate
from miles.train.losses import LossInputs
from miles.train.normalisation import token_weights

RolloutBatch = dict[str, Any]
"""Columns with one entry per sample: ``tokens`` (int, prompt and response), ``response_lengths``, ``loss_masks`` and
``rollout_log_probs`` (one entry per response token), ``raw_reward`` (float or None), ``group_ids``, ``rollout_ids``,
``sample_indices``. Where there are ``rewards`` (float or None), of a hook, they take the place of normalized ones. What
else there is goes to a user's own loss."""

READ = {
    "tokens", "response_lengths", "loss_masks", "rollout_log_probs", "raw_reward", "rewards", "group_ids", "rollout_ids",
    "sample_indices",
}  # fmt: skip
"""Columns that the trainer itself reads."""

Rollout = tuple[int, int]
"""Group id and rollout id."""


@dataclass(frozen=True)
class TrainSample:
    """One sample as the trainer sees it. A = number of trained tokens."""

    index: int
    tokens: npt.NDArray[np.int64]
    """[L], prompt and response."""
    response_length: int
    trained: npt.NDArray[np.int64]
    """[A], where in ``tokens`` the trained ones are; never 0, since nothing predicts the first token."""
    rollout_log_probs: npt.NDArray[np.float32]
    """[A]"""
    whole: bool = False
    """The model predicts every token of the response, not the trained ones alone."""
    advantage: float = 0.0
    """As `miles.train.advantages.estimate` makes it."""
    scored: bool = True
    weight: float = 0.0
    """Of each trained token, `miles.train.normalisation`."""
    terms: int = 1
    """What the loss of the optimizer step is a mean over: the number of its rollouts, or of its trained tokens."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Entries of the columns that the trainer doesn't read."""

    @property
    def predicted(self) -> npt.NDArray[np.int64]:
        """Where in ``tokens`` those are that the model predicts."""
        return np.arange(len(self.tokens) - self.response_length, len(self.tokens)) if self.whole else self.trained

    @property
    def input_length(self) -> int:
        """Tokens that the model reads: all up to the one that predicts the last; a sample with nothing to predict has one."""
        return int(self.predicted[-1]) if len(self.predicted) else 1


@dataclass(frozen=True)
class MicroBatch:
    """One forward pass. B rows of width T predict P tokens, those of a sample in order, samples in order. N of them are
    trained; P is N unless whole responses are predicted."""

    members: tuple[TrainSample, ...]
    input_ids: Tensor
    """[B, T], int64"""
    position_ids: Tensor | None
    """[B, T], starting anew with each sample of a packed row; None: one sample per row."""
    predicts: Tensor
    """[P], int64: indices into the flattened B * T positions, each predicts one token."""
    targets: Tensor
    """[P], int64: those tokens."""
    trained: Tensor
    """[N], int64: which of the P are trained."""
    samples: Tensor
    """[P], int64: index of the sample that each belongs to."""
    inputs: LossInputs

    @property
    def width(self) -> int:
        return self.input_ids.shape[1]


def read_batch(
    batch: RolloutBatch, train: TrainSettings, *, optimizer_steps: int, vocabulary: int
) -> list[list[TrainSample]]:
    """The samples of each optimizer step that have something to train, with advantages and weights.

    Whole groups stay in one step, in the order of the batch, the same number of groups in each. Samples that share a rollout
    id (pieces of one conversation) are one reward in the baseline and one term of the loss. Raises `TrainerError` with the
    index of the sample that can't be trained. ``vocabulary``: number of token ids that the model knows.
    """
    samples = [_read_sample(batch, i, vocabulary, train) for i in range(len(batch["tokens"]))]
    rollouts = list(zip(batch["group_ids"], batch["rollout_ids"], strict=True))
    advantages = _advantages(batch, rollouts, train)
    steps = []
    for members in split_groups(batch["group_ids"], optimizer_steps):
        tokens: Counter[Rollout] = Counter()
        for i in members:
            tokens[rollouts[i]] += len(samples[i].trained)
        weights = token_weights(list(tokens.values()), per_token=train.calculate_per_token_loss)
        weight_of = dict(zip(tokens, weights.tolist(), strict=True))
        terms = tokens.total() if train.calculate_per_token_loss else len(tokens)
        steps.append(
            [
                replace(
                    samples[i],
                    advantage=advantages[i] or 0.0,
                    scored=advantages[i] is not None,
                    weight=weight_of[rollouts[i]],
                    terms=terms,
                )
                for i in members
                if len(samples[i].trained)
            ]
        )
    return steps


def _advantages(batch: RolloutBatch, rollouts: Sequence[Rollout], train: TrainSettings) -> list[float | None]:
    """One advantage per sample: that of its rollout, from the rollout's one reward, unless a hook has made rewards; None
    where nobody has scored it."""
    if not are_read(train):
        return [0.0] * len(rollouts)
    given: Sequence[float | None] = batch["rewards" if "rewards" in batch else "raw_reward"]
    for index, reward in zip(batch["sample_indices"], given, strict=True):
        if reward is not None and not math.isfinite(reward):
            raise TrainerError(f"sample {index}: its reward is {reward}; a finite number works, or None for unscored")
    if "rewards" in batch:
        return list(given)
    rewards: dict[Rollout, float | None] = {}
    for index, rollout, reward in zip(batch["sample_indices"], rollouts, given, strict=True):
        if rewards.setdefault(rollout, reward) != reward:
            raise TrainerError(
                f"sample {index} has reward {reward}, another sample of rollout {rollout[1]} has {rewards[rollout]}: "
                "samples of one rollout share their reward"
            )
    advantages = estimate(list(rewards.values()), [group for group, _ in rewards], train)
    advantage_of = dict(zip(rewards, advantages.tolist(), strict=True))
    return [None if rewards[rollout] is None else advantage_of[rollout] for rollout in rollouts]


def split_groups(group_ids: Sequence[int], steps: int) -> list[list[int]]:
    """Positions of the samples of each optimizer step: whole groups, by id, in the order of their first sample."""
    members: dict[int, list[int]] = {}
    for position, group in enumerate(group_ids):
        members.setdefault(group, []).append(position)
    if len(members) < steps:
        raise TrainerError(f"{len(members)} groups in the batch can't make {steps} optimizer steps")
    groups = list(members.values())
    bounds = [len(groups) * k // steps for k in range(steps + 1)]
    return [[i for group in groups[a:b] for i in group] for a, b in pairwise(bounds)]


def fill_up(samples: Sequence[TrainSample], ranks: int) -> list[TrainSample]:
    """Adds samples of one token and nothing to train until their number is a multiple of ``ranks``: each rank needs work."""
    first = samples[0]
    idle = replace(
        first, tokens=first.tokens[:2], response_length=0, trained=first.trained[:0],
        rollout_log_probs=first.rollout_log_probs[:0],
    )  # fmt: skip
    return [*samples, *[idle] * (-len(samples) % ranks)]


def collate(samples: Sequence[TrainSample], *, packed: bool, device: torch.device) -> MicroBatch:
    """Rows padded at the end, one per sample; ``packed``: one row with all samples end to end."""
    lengths = [s.input_length for s in samples]
    position_ids = None
    if packed:
        input_ids = np.concatenate([s.tokens[:n] for s, n in zip(samples, lengths, strict=True)])[None]
        position_ids = torch.from_numpy(np.concatenate([np.arange(n) for n in lengths])[None]).to(device)
        starts = np.cumsum([0, *lengths[:-1]])
    else:
        input_ids = np.zeros((len(samples), max(lengths)), dtype=np.int64)
        for row, sample, length in zip(input_ids, samples, lengths, strict=True):
            row[:length] = sample.tokens[:length]
        starts = np.arange(len(samples)) * input_ids.shape[1]

    def flat(values: Sequence[npt.NDArray[Any]], dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(np.concatenate(values)).to(device, dtype)

    counts = [len(s.trained) for s in samples]
    first = np.cumsum([0, *(len(s.predicted) for s in samples)])
    return MicroBatch(
        members=tuple(samples),
        input_ids=torch.from_numpy(input_ids).to(device),
        position_ids=position_ids,
        predicts=flat([start + s.predicted - 1 for start, s in zip(starts, samples, strict=True)], torch.int64),
        targets=flat([s.tokens[s.predicted] for s in samples], torch.int64),
        trained=flat(
            [a + np.searchsorted(s.predicted, s.trained) for a, s in zip(first, samples, strict=False)], torch.int64
        ),
        samples=flat([np.full(len(s.predicted), s.index) for s in samples], torch.int64),
        inputs=LossInputs(
            rollout_log_probs=flat([s.rollout_log_probs for s in samples], torch.float32),
            advantages=flat([np.full(n, s.advantage) for n, s in zip(counts, samples, strict=True)], torch.float32),
            weights=flat([np.full(n, s.weight) for n, s in zip(counts, samples, strict=True)], torch.float32),
            lengths=tuple(counts),
        ),
    )


def _read_sample(batch: RolloutBatch, i: int, vocabulary: int, train: TrainSettings) -> TrainSample:
    index, response_length = int(batch["sample_indices"][i]), int(batch["response_lengths"][i])
    tokens = np.asarray(batch["tokens"][i], dtype=np.int64)
    mask, log_probs = batch["loss_masks"][i], batch["rollout_log_probs"][i]
    if log_probs is None and train.loss_type != "policy_loss":
        log_probs = np.zeros(response_length)
    for name, values in (("loss mask", mask), ("rollout log-probs", log_probs)):
        if values is None or len(values) != response_length:
            count = "no" if values is None else len(values)
            raise TrainerError(f"sample {index} has {count} {name} entries for {response_length} response tokens")
    if response_length > len(tokens):
        raise TrainerError(f"sample {index} has {len(tokens)} tokens, fewer than its {response_length} response tokens")
    if len(tokens) and not 0 <= tokens.min() <= tokens.max() < vocabulary:
        raise TrainerError(f"sample {index} has a token id that is not within the {vocabulary} of the model")
    whole = train.loss_type == "custom_loss"
    active = np.flatnonzero(np.asarray(mask))
    trained = active + len(tokens) - response_length
    trained_log_probs = np.asarray(log_probs, dtype=np.float32)[active]
    if len(trained) and (trained[0] == 0 or (whole and response_length == len(tokens))):
        raise TrainerError(f"sample {index} has no prompt: nothing predicts its first token, so it can't be trained")
    if not np.isfinite(trained_log_probs).all():
        at = int(active[~np.isfinite(trained_log_probs)][0])
        raise TrainerError(f"sample {index}: the engine's log-prob of response token {at} is {log_probs[at]}")
    extra = {name: column[i] for name, column in batch.items() if name not in READ} if whole else {}
    return TrainSample(index, tokens, response_length, trained, trained_log_probs, whole, extra=extra)
