"""A trainer's state in, a folder of torch.distributed.checkpoint shards out, and back on any number of ranks.

Held: float32 weights, AdamW's moments, and the number of the next training step. The position in the learning-rate schedule
follows from that number. `miles.train.random_state` keeps the random state beside it.
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


def save(folder: str, policy: Policy, optimizer: Optimizer | None, next_step: int) -> None:
    """Every rank writes its shards into ``folder``; without ``optimizer``, or before its first step, no moments are held."""
    state: dict[str, Any] = {"model": policy.tensors(), "next_step": next_step}
    if optimizer is not None and optimizer.state:
        state["moments"] = _moments(policy, optimizer)
    save_shards(state, checkpoint_id=folder)


def load(folder: str, policy: Policy, optimizer: Optimizer) -> int:
    """Fills policy and optimizer from ``folder`` and returns the next step. Raises `TrainerError` where it doesn't fit.

    Learning rate, betas and weight decay stay those of the settings: a resumed run may change them.
    """
    if not (Path(folder) / METADATA).is_file():
        raise TrainerError(f"{folder} is no finished miles checkpoint: it has no {METADATA}")
    saved = FileSystemReader(folder).read_metadata().state_dict_metadata
    state: dict[str, Any] = {"model": policy.tensors(), "next_step": 0}
    if any(key.startswith("moments.") for key in saved):
        state["moments"] = _moments(policy, optimizer)
    else:
        logger.warning("%s holds no optimizer state: AdamW's moments start at 0", folder)
    try:
        load_shards(state, checkpoint_id=folder)
    except CheckpointException as error:
        raise TrainerError(f"{folder} doesn't fit the model of --hf-checkpoint: {error}") from error
    return int(state["next_step"])


def _moments(policy: Policy, optimizer: Optimizer) -> Any:
    """AdamW's state by parameter name: its own tensors, made where there are none yet, which loading fills in place."""
    return get_optimizer_state_dict(policy.model, optimizer)["state"]
