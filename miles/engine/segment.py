"""Flat weights in shared memory: a manifest says where each tensor lies, `map_segment` gives views without a copy.

One file per segment, `manifest.json` beside it in the same folder; all segments of a folder share that manifest. Who
may write which segment is the publisher's business (`miles/weights`); this is only the layout.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

ALIGNMENT = 64


@dataclass(frozen=True)
class TensorSlot:
    """Where one tensor lies: ``offset`` and ``nbytes`` in bytes, ``dtype`` as torch names it ("bfloat16")."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Manifest:
    """The layout of a segment, in the order of the model's state dict."""

    slots: tuple[TensorSlot, ...]
    nbytes: int

    @classmethod
    def plan(cls, tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]]) -> Manifest:
        """Lays tensors (name, dtype, shape) out one after the other, each aligned to 64 bytes."""
        slots, offset = [], 0
        for name, dtype, shape in tensors:
            nbytes = math.prod(shape) * dtype.itemsize
            slots.append(TensorSlot(name, str(dtype).removeprefix("torch."), tuple(shape), offset, nbytes))
            offset += -(-nbytes // ALIGNMENT) * ALIGNMENT
        return cls(tuple(slots), offset)

    def save(self, folder: Path) -> None:
        """Writes ``folder/manifest.json`` atomically."""
        part = folder / f"manifest.{os.getpid()}.tmp"
        part.write_text(json.dumps({"nbytes": self.nbytes, "slots": [asdict(s) for s in self.slots]}))
        part.replace(folder / "manifest.json")

    @classmethod
    def load(cls, folder: Path) -> Manifest:
        values = json.loads((folder / "manifest.json").read_text())
        return cls(tuple(TensorSlot(**s | {"shape": tuple(s["shape"])}) for s in values["slots"]), values["nbytes"])


def create_segment(path: Path, nbytes: int) -> None:
    """Makes the file with all its bytes reserved, so that a full /dev/shm is an OSError here and no bus error later."""
    with open(path, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, max(nbytes, 1))


def map_segment(path: Path, manifest: Manifest) -> dict[str, torch.Tensor]:
    """Views of every tensor in the segment; writing to them writes the segment. Raises ValueError on a short file."""
    size = path.stat().st_size
    if size < manifest.nbytes:
        raise ValueError(f"{path} has {size} bytes, its manifest needs {manifest.nbytes}")
    flat = torch.from_file(str(path), shared=True, size=manifest.nbytes, dtype=torch.uint8)
    return {
        s.name: flat[s.offset : s.offset + s.nbytes].view(getattr(torch, s.dtype)).view(s.shape) for s in manifest.slots
    }
