"""Sharded weights in, Hugging Face folders out: exports for users, and published versions that any engine can load."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from miles.train.model import Policy
from miles.types import Weights

WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"}


def save_hf(folder: Path, policy: Policy, source: Path) -> None:
    """Writes ``folder`` on rank 0: safetensors in the compute type, config, and the other files of ``source``.

    All ranks take part; tensors are gathered one by one, already cast. Returns on all ranks once the folder is complete.
    """
    weights = {name: _gather(tensor, policy.dtype) for name, tensor in policy.tensors().items()}
    if dist.get_rank() == 0:
        policy.model.save_pretrained(folder, state_dict=weights)
        policy.model.config.dtype = str(policy.dtype).removeprefix("torch.")
        policy.model.config.save_pretrained(folder)
        for file in source.iterdir():
            weight_file = file.suffix in WEIGHT_SUFFIXES or file.name.endswith(".index.json")
            if file.is_file() and not weight_file and file.name != "config.json":
                shutil.copy(file, folder / file.name)
    dist.barrier()


def write_version(folder: Path, policy: Policy, source: Path, version: int, busy: frozenset[str]) -> Weights:
    """Publishes through a disk: ``folder/version_000007``, which appears only once it is complete.

    Older versions are removed unless their path is in ``busy``.
    """
    target, part = folder / f"version_{version:06d}", folder / f"version_{version:06d}.part"
    save_hf(part, policy, source)
    if dist.get_rank() == 0:
        if target.exists():
            shutil.rmtree(target)
        part.rename(target)
        for old in folder.glob("version_*"):
            if old != target and str(old) not in busy:
                shutil.rmtree(old)
    dist.barrier()
    return Weights(version, "disk", str(target))


def _gather(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The whole tensor, on the CPU of rank 0; floating-point parameters in ``dtype``, anything else as it is."""
    if isinstance(tensor, DTensor):
        tensor = tensor.to(dtype).full_tensor()  # type: ignore[attr-defined]
    return tensor.cpu() if dist.get_rank() == 0 else tensor.new_empty(0)
