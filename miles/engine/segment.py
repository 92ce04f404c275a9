"""Flat weights in shared memory: a manifest says where each tensor lies, `Segment` gives views without a copy.

    tensor 0 | tensor 1 | ... | one 64-bit checksum per tensor, written last (`seal`) and checked first (`verify`)

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

import numpy as np
import torch

ALIGNMENT = 64
WORD = 8


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
    """The layout of a segment, in the order of the model's state dict; ``nbytes`` are those of the tensors."""

    slots: tuple[TensorSlot, ...]
    nbytes: int

    @property
    def total(self) -> int:
        """Bytes of the whole file, checksums included."""
        return self.nbytes + WORD * len(self.slots)

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


def create_segment(path: Path, manifest: Manifest) -> None:
    """Makes the file with all its bytes reserved, so that a full /dev/shm is an OSError here and no bus error later."""
    with open(path, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, max(manifest.total, 1))


class Segment:
    """A mapped segment: ``tensors`` are views by name, and writing to them writes the file.

    Raises ValueError on a short file.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        size = path.stat().st_size
        if size < manifest.total:
            raise ValueError(f"{path} has {size} bytes, its manifest needs {manifest.total}")
        self._path = path
        self._slots = manifest.slots
        flat = torch.from_file(str(path), shared=True, size=manifest.total, dtype=torch.uint8)
        self._words = flat[: manifest.nbytes].numpy().view(np.uint64)
        self._sums = flat[manifest.nbytes :].numpy().view(np.uint64)
        self.tensors = {
            s.name: flat[s.offset : s.offset + s.nbytes].view(getattr(torch, s.dtype)).view(s.shape)
            for s in self._slots
        }

    def seal(self, first: int = 0, step: int = 1) -> None:
        """Writes the checksums of every ``step``-th tensor from ``first`` on: of complete tensors, shared among ranks."""
        for index in range(first, len(self._slots), step):
            self._sums[index] = self._sum(self._slots[index])

    def verify(self) -> None:
        """Raises ValueError, naming the first tensor whose bytes are not those that were sealed."""
        for slot, told in zip(self._slots, self._sums, strict=True):
            if self._sum(slot) != told:
                raise ValueError(f"{slot.name} {list(slot.shape)} {slot.dtype} differs from its checksum")

    def _sum(self, slot: TensorSlot) -> np.uint64:
        """The sum of a tensor's bytes as 64-bit words, with the zeroes up to its alignment, modulo 2**64.

        It finds weights that were not written to their end, at the speed of memory; it is no guard against forgery.
        """
        padded = -(-slot.nbytes // ALIGNMENT) * ALIGNMENT
        total: np.uint64 = np.add.reduce(self._words[slot.offset // WORD : (slot.offset + padded) // WORD])
        return total
