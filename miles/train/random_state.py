"""The random state of one rank in, a file of a checkpoint out, and back: Python's, numpy's and torch's generators.

Nothing of the trainer draws at random after the weights are loaded; users' hooks may.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch


def save(folder: str, rank: int) -> None:
    """Writes the state of this process into an existing folder."""
    name, keys, *rest = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": [name, np.asarray(keys).tolist(), *rest],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }
    torch.save(state, _file(folder, rank))


def load(folder: str, rank: int) -> bool:
    """Goes on from what this rank saved. False, and nothing changes, where the checkpoint has no such rank."""
    file = _file(folder, rank)
    if not file.exists():
        return False
    state = torch.load(file, weights_only=True)
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    return True


def _file(folder: str, rank: int) -> Path:
    return Path(folder) / f"rng_{rank}.pt"
