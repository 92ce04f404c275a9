"""Sharded weights in, a segment of shared memory out: every rank writes its own rows, nothing is gathered.

A segment that an engine may still read is never written: `write_segment` takes the first one that isn't busy, and all bytes
of a version lie there before anybody is told of it. Layout: `miles.engine.segment`.
"""

from __future__ import annotations

import errno
import shutil
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from miles.engine.segment import Manifest, Segment, create_segment
from miles.errors import TrainerError
from miles.types import Weights


def write_segment(
    tensors: dict[str, Tensor], dtype: torch.dtype, version: int, folder: Path, busy: frozenset[str]
) -> Weights:
    """Writes ``tensors`` into a segment in ``folder``: sharded ones cast to ``dtype``, others as they are.

    All ranks take part, and all of them have written, checksums included, when it returns. Raises `TrainerError` on all
    ranks where the segment can't be made.
    """
    manifest = Manifest.plan(
        (name, dtype if isinstance(t, DTensor) else t.dtype, tuple(t.shape)) for name, t in tensors.items()
    )
    made = [_free_segment(manifest, folder, busy) if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(made, src=0)
    [path] = made
    if isinstance(path, TrainerError):
        raise path
    segment = Segment(Path(path), manifest)
    for name, tensor in tensors.items():
        _write_own_rows(tensor.detach(), segment.tensors[name])
    dist.barrier()
    segment.seal(first=dist.get_rank(), step=dist.get_world_size())
    dist.barrier()
    return Weights(version, "shm", path)


def _free_segment(manifest: Manifest, folder: Path, busy: frozenset[str]) -> str | TrainerError:
    """The first segment that nobody reads, made where it is absent or of another size; or why that failed, for all ranks."""
    path = next(p for p in (folder / f"segment-{k}.bin" for k in count()) if str(p) not in busy)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.stat().st_size != max(manifest.total, 1):
            path.unlink(missing_ok=True)
            create_segment(path, manifest)
        if not (folder / "manifest.json").exists() or Manifest.load(folder) != manifest:
            manifest.save(folder)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            return TrainerError(f"can't write weights to {path}: {error}")
        path.unlink(missing_ok=True)
        free = shutil.disk_usage(folder).free
        return TrainerError(
            f"can't write weights to {path}: it needs {manifest.total} bytes and {free} are free; "
            "make room there or use --update-weight-transfer-mode disk"
        )
    return str(path)


def _write_own_rows(tensor: Tensor, view: Tensor) -> None:
    """Copies what this rank holds into the segment: its rows of a tensor that FSDP2 sharded along dimension 0."""
    if not isinstance(tensor, DTensor):
        if dist.get_rank() == 0:
            view.copy_(tensor)
        return
    rows = tensor.to_local()
    start = tensor.device_mesh.get_local_rank() * -(-tensor.shape[0] // tensor.device_mesh.size())
    view[start : start + len(rows)].copy_(rows)
