"""A trainer's state in, a folder of torch.distributed.checkpoint shards out, and back on any number of ranks.

Held: float32 weights, AdamW's moments, the number of the next training step, and a reference policy where it moves. The
position in the learning-rate schedule follows from that number. `miles.train.random_state` keeps the random state beside it.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.checkpoint.state_dict_saver import save as save_shards
from torch.optim import Optimizer

from miles.errors import TrainerError
from miles.train.model import Policy

logger = logging.getLogger(__name__)

METADATA = ".metadata"


def save(
    folder: str, policy: Policy, optimizer: Optimizer | None, next_step: int, reference: Policy | None = None
) -> None:
    """Every rank writes its shards into ``folder``; without ``optimizer``, or before its first step, no moments are held.

    ``reference``: a reference policy that isn't the one of the run's start any more."""
    state: dict[str, Any] = {"model": policy.tensors(), "next_step": next_step}
    if reference is not None:
        state["reference"] = reference.tensors()
    if optimizer is not None and optimizer.state:
        state["moments"] = _moments(policy, optimizer)
    save_shards(state, checkpoint_id=folder)


def load(folder: str, policy: Policy, optimizer: Optimizer, reference: Policy | None = None) -> int:
    """Fills policy and optimizer, and ``reference`` where one is held, from ``folder`` and returns the next step.

    Raises `TrainerError` where it doesn't fit. Learning rate, betas and weight decay stay those of the settings: a resumed
    run may change them.
    """
    saved = _saved(folder)
    state: dict[str, Any] = {"model": policy.tensors(), "next_step": 0}
    if any(key.startswith("moments.") for key in saved):
        state["moments"] = _moments(policy, optimizer)
    else:
        logger.warning("%s holds no optimizer state: AdamW's moments start at 0", folder)
    if reference is not None and any(key.startswith("reference.") for key in saved):
        state["reference"] = reference.tensors()
    _fill(state, folder)
    return int(state["next_step"])


def load_policy(folder: str, policy: Policy) -> None:
    """Fills the weights alone. Raises `TrainerError` where they don't fit."""
    _saved(folder)
    _fill({"model": policy.tensors()}, folder)


def _saved(folder: str) -> Any:
    """What a checkpoint holds, by key."""
    if not (Path(folder) / METADATA).is_file():
        raise TrainerError(f"{folder} is no finished miles checkpoint: it has no {METADATA}")
    return FileSystemReader(folder).read_metadata().state_dict_metadata


def _fill(state: dict[str, Any], folder: str) -> None:
    try:
        load_shards(state, checkpoint_id=folder)
    except CheckpointException as error:
        raise TrainerError(f"{folder} doesn't fit the model of --hf-checkpoint: {error}") from error


def _moments(policy: Policy, optimizer: Optimizer) -> Any:
    """AdamW's state by parameter name: its own tensors, made where there are none yet, which loading fills in place."""
    return get_optimizer_state_dict(policy.model, optimizer)["state"]
