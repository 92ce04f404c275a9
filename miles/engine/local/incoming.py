"""Tensors that arrive in parts in, one complete set of weights out: nothing of it serves before all of it is here.

    begin ──▶ add, add, ... (buckets: from a process group, or in a request's body) ──▶ end

A bucket outside of begin and end is a whole update by itself, or is refused.
"""

from __future__ import annotations

import base64
import binascii
import io
import pickle
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import safetensors
import torch
from torch import Tensor

from miles.engine.local.model_config import ModelConfig
from miles.engine.local.weights import check_tensors, expected_shapes, flat_views
from miles.engine.weight_group import WeightGroup
from miles.errors import EngineRefused

FORMATS = (None, "direct", "auto", "safetensors")
NAMED = 5
"""So many tensors are named in a message."""


class Incoming:
    """The weights of one update while they arrive, in memory of their own. ``label`` is what they will be called."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        self.label: str | None = None
        self._config = config
        self._views = flat_views(expected_shapes(config), dtype)
        self._arrived: set[str] = set()

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes a bucket, whole or not at all. Raises EngineRefused, naming tensor, shape and dtype."""
        described = {n: (tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in tensors.items()}
        for name in check_tensors(described, self._config, where="these tensors"):
            self._views[name].copy_(tensors[name])
            self._arrived.add(name)

    def complete(self) -> dict[str, Tensor]:
        """All weights. Raises EngineRefused while some are missing."""
        missing = [n for n in self._views if n not in self._arrived]
        if missing:
            shown = ", ".join(missing[:NAMED]) + (", ..." if len(missing) > NAMED else "")
            raise EngineRefused(
                f"{len(missing)} of {len(self._views)} tensors have not arrived ({shown}); the weights stay as they were. "
                "Send parts between /begin_weight_update and /end_weight_update"
            )
        return self._views


def receive(
    group: WeightGroup, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]
) -> dict[str, Tensor]:
    """A bucket that rank 0 of the group broadcasts. Raises EngineFailed where it never comes."""
    tensors = {
        name: torch.empty(tuple(shape), dtype=getattr(torch, dtype.removeprefix("torch.")))
        for name, dtype, shape in zip(names, dtypes, shapes, strict=True)
    }
    group.broadcast(list(tensors.values()))
    return tensors


def check_bucket(
    config: ModelConfig, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]
) -> None:
    """Raises EngineRefused where a bucket can't be received as it is described, before anybody waits for it."""
    if not len(names) == len(dtypes) == len(shapes):
        raise EngineRefused(
            f"{len(names)} names, {len(dtypes)} dtypes and {len(shapes)} shapes; as many of each needed"
        )
    kinds = [d.removeprefix("torch.") for d in dtypes]
    check_tensors(
        {n: (tuple(s), k) for n, k, s in zip(names, kinds, shapes, strict=True)}, config, where="these tensors"
    )


def decode(payload: Any, load_format: str | None) -> dict[str, Tensor]:
    """Tensors by name from base64 in a request's body. Raises EngineRefused.

    ``load_format`` "safetensors": a safetensors file. Otherwise SGLang's: a pickled list of (name, tensor), or what that
    project's flattened bucket is not; the tensors by value, since the body may come from another machine.
    """
    if load_format not in FORMATS:
        raise EngineRefused(f"load_format {load_format!r} is not supported; safetensors is, and so is leaving it out")
    try:
        raw = base64.b64decode(payload, validate=True)
        if load_format == "safetensors":
            return _from_safetensors(raw)
        named = _TensorsOnly(io.BytesIO(raw)).load()
        pairs: Iterable[Any] = named.items() if isinstance(named, dict) else named
        tensors = {str(name): tensor for name, tensor in pairs}
    except (binascii.Error, pickle.UnpicklingError, safetensors.SafetensorError) as error:
        raise EngineRefused(f"serialized_named_tensors can't be read: {error}") from error
    except Exception as error:  # invariant: whatever bytes were sent, the sender is told that they are no tensors
        raise EngineRefused(f"serialized_named_tensors is no list of (name, tensor): {type(error).__name__}") from error
    if wrong := [n for n, t in tensors.items() if not isinstance(t, Tensor)]:
        raise EngineRefused(f"serialized_named_tensors: {wrong[0]} is no tensor")
    return tensors


def _from_safetensors(raw: bytes) -> dict[str, Tensor]:
    from safetensors.torch import load

    tensors: dict[str, Tensor] = load(raw)
    return tensors


class _TensorsOnly(pickle.Unpickler):
    """Reads pickled CPU tensors; any other object in the bytes is refused, so that none of it runs."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return lambda raw: torch.load(io.BytesIO(raw), weights_only=True)
        if (module, name) in (("torch._utils", "_rebuild_tensor_v2"), ("collections", "OrderedDict")):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(
            f"it holds {module}.{name}; tensors by value are needed: pickle.dumps of CPU tensors, "
            'or load_format "safetensors"'
        )
