"""What one rank has of an optimizer step in, what all ranks have together out; failures of one are raised on all."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from miles.errors import HookError, TrainerError
from miles.train.losses import Part


def sum_over_ranks(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """A small vector of each rank, added up."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, values)
    total: npt.NDArray[np.float64] = np.sum(everyone, axis=0)
    return total


def failing_sample(log_probs_N: Tensor, samples_N: Tensor) -> Tensor:
    """The index of a sample that has a log-prob that isn't finite, or -1; scalar."""
    none = samples_N.new_full((1,), -1)
    return torch.cat([none, samples_N.masked_fill(log_probs_N.detach().isfinite(), -1)]).amax()


def exchange(
    parts: Sequence[Part], failed: Sequence[Tensor], hook_error: str, where: str
) -> tuple[dict[str, float], dict[str, float]]:
    """`Part.shares` and `Part.sums` of all micro-batches of all ranks, added up by name.

    ``failed``: `failing_sample` of each micro-batch. Raises `TrainerError` with the index of one of them, or `HookError` with
    ``hook_error`` where a rank has one.
    """
    sample = int(torch.stack(list(failed)).max()) if failed else -1
    own = (_floats(p.shares for p in parts), _floats(p.sums for p in parts), sample, hook_error)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    shares, sums, indices, errors = zip(*everyone, strict=True)
    if max(indices) >= 0:
        raise TrainerError(f"{where}: a log-prob of sample {max(indices)} isn't finite under the trainer's weights")
    for error in filter(None, errors):
        raise HookError(f"{where}: {error}")
    return _add_up(shares), _add_up(sums)


def _floats(values: Iterable[Mapping[str, Tensor]]) -> dict[str, float]:
    """Added up by name; one transfer from the device."""
    totals: dict[str, Tensor] = {}
    for named in values:
        for name, value in named.items():
            totals[name] = value.detach().double().reshape(()) + totals.get(name, 0.0)
    return dict(zip(totals, torch.stack(list(totals.values())).tolist(), strict=True)) if totals else {}


def _add_up(values: Iterable[Mapping[str, float]]) -> dict[str, float]:
    totals: dict[str, float] = defaultdict(float)
    for named in values:
        for name, value in named.items():
            totals[name] += value
    return dict(totals)
