"""The groups of a batch in, the columns that a user's converter makes of their samples out, checked and complete."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from miles.errors import HookError
from miles.rollout.conversion import RolloutBatch
from miles.rollout.post_process import call_with_samples
from miles.types import FinishedGroup, Sample, iter_samples

NEEDED = ("tokens", "response_lengths", "loss_masks")
SCALARS = ("dynamic_global_batch_size",)
"""What other trainers read beside columns; here an optimizer step is a share of the batch's groups."""
PER_TOKEN = ("loss_masks", "rollout_log_probs", "teacher_log_probs")


async def convert(path: str, args: Namespace, groups: Sequence[FinishedGroup]) -> RolloutBatch:
    """Calls f(args, samples) -> dict of columns with all samples of a batch, on a thread unless it is async.

    The hook may leave samples out and change what is in them. ``rewards`` are trained as they are; without them
    ``raw_reward`` is normalized as usual. Group ids, and ``sample_indices`` and ``rollout_ids`` where they are missing, are
    those of the samples. Raises HookError where the hook fails or its columns don't fit together.
    """
    owners = [(group.issue_id, sample) for group in groups for sample in iter_samples(group.samples)]
    result = await call_with_samples(path, args, [sample for _, sample in owners])
    if not isinstance(result, Mapping):
        raise HookError(f"{path} returned a {type(result).__name__}; a dict of columns works: {', '.join(NEEDED)}, ...")
    batch = {str(name): column for name, column in result.items() if name not in SCALARS}
    single = [name for name, column in batch.items() if not hasattr(column, "__len__")]
    if single:
        raise HookError(
            f"{path}: {single[0]} is a {type(batch[single[0]]).__name__}; a list works, one entry per sample"
        )
    missing = [name for name in NEEDED if name not in batch]
    if missing:
        raise HookError(f"{path}: the dict has no {' and no '.join(missing)}; it has {', '.join(sorted(batch))}")
    count = len(batch["tokens"])
    uneven = [f"{name} {len(column)}" for name, column in batch.items() if len(column) != count]
    if uneven or not count:
        raise HookError(f"{path}: columns have one entry per sample, but tokens {count}, {', '.join(uneven) or 'none'}")
    rows = _rows(path, batch, owners)
    batch["group_ids"] = [group for group, _ in rows]
    batch["sample_indices"] = [sample.index for _, sample in rows]
    if "rollout_ids" not in batch:
        batch["rollout_ids"] = [s.index if s.rollout_id is None else s.rollout_id for _, s in rows]
    for name in ("rollout_log_probs", "raw_reward"):
        batch.setdefault(name, [None] * count)
    _check_rows(path, batch)
    _drop_mask_sums(path, batch)
    return batch


def _rows(path: str, batch: RolloutBatch, owners: Sequence[tuple[int, Sample]]) -> list[tuple[int, Sample]]:
    """Group id and sample of each row: by ``sample_indices``, else by position."""
    if "sample_indices" not in batch:
        if len(batch["tokens"]) == len(owners):
            return list(owners)
        raise HookError(
            f"{path}: {len(batch['tokens'])} rows for {len(owners)} samples, and no sample_indices that say which; "
            "[s.index for s in ...] works"
        )
    by_index = {sample.index: (group, sample) for group, sample in owners}
    unknown = [i for i in batch["sample_indices"] if i not in by_index]
    if unknown:
        raise HookError(
            f"{path}: sample_indices has {unknown[0]!r}, which is no sample of the batch; sample.index works"
        )
    return [by_index[i] for i in batch["sample_indices"]]


def _check_rows(path: str, batch: RolloutBatch) -> None:
    """Each row holds together."""
    for i, index in enumerate(batch["sample_indices"]):
        length = batch["response_lengths"][i]
        if not isinstance(length, int | np.integer) or not 0 <= length <= len(batch["tokens"][i]):
            raise HookError(
                f"{path}: response_lengths of sample {index} is {length!r}, of {len(batch['tokens'][i])} tokens"
            )
        for name in PER_TOKEN:
            values = batch[name][i] if name in batch else None
            if values is not None and len(values) != length:
                raise HookError(
                    f"{path}: {name} of sample {index} has {len(values)} entries for {length} response tokens"
                )
        for name in ("rewards", "raw_reward"):
            value = batch[name][i] if name in batch else None
            if value is not None and (
                isinstance(value, bool | str) or not np.isscalar(value) or not np.isfinite(value)
            ):
                raise HookError(f"{path}: {name} of sample {index} is {value!r:.80}; a finite number or None works")


def _drop_mask_sums(path: str, batch: RolloutBatch) -> None:
    """``rollout_mask_sums`` are derived from the masks here: those that say something else would be passed over silently."""
    given = batch.pop("rollout_mask_sums", None)
    if given is None:
        return
    sums: Counter[Any] = Counter()
    for rollout, mask in zip(batch["rollout_ids"], batch["loss_masks"], strict=True):
        sums[rollout] += int(np.count_nonzero(mask))
    for index, rollout, value in zip(batch["sample_indices"], batch["rollout_ids"], given, strict=True):
        if value != sums[rollout]:
            raise HookError(
                f"{path}: rollout_mask_sums of sample {index} is {value}, the loss masks of its rollout add up to "
                f"{sums[rollout]}; leave the column out"
            )
