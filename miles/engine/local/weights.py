"""A safetensors folder, a shared-memory segment or a dict of tensors in; exactly the weights a model needs out, or why not.

All or nothing: names, shapes and dtypes are checked before anything is copied, and nobody sees a half-read set.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from miles.engine.local.model_config import ModelConfig
from miles.engine.segment import Manifest, Segment
from miles.errors import EngineRefused

Shape = tuple[int, ...]
FLOATS = ("F64", "F32", "F16", "BF16", "float64", "float32", "float16", "bfloat16")


def expected_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Name and shape of every weight under its Hugging Face name, in the order of the model's state dict."""
    hidden, heads, kv, d = config.hidden_size, config.heads, config.kv_heads, config.head_dim
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}

    def linear(name: str, rows: int, columns: int, bias: bool) -> None:
        shapes[f"{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"{name}.bias"] = (rows,)

    for i in range(config.layers):
        layer = f"model.layers.{i}"
        linear(f"{layer}.self_attn.q_proj", heads * d, hidden, config.attention_bias)
        linear(f"{layer}.self_attn.k_proj", kv * d, hidden, config.attention_bias)
        linear(f"{layer}.self_attn.v_proj", kv * d, hidden, config.attention_bias)
        linear(f"{layer}.self_attn.o_proj", hidden, heads * d, config.attention_bias)
        if config.qk_norm:
            shapes[f"{layer}.self_attn.q_norm.weight"] = (d,)
            shapes[f"{layer}.self_attn.k_norm.weight"] = (d,)
        linear(f"{layer}.mlp.gate_proj", config.intermediate_size, hidden, config.mlp_bias)
        linear(f"{layer}.mlp.up_proj", config.intermediate_size, hidden, config.mlp_bias)
        linear(f"{layer}.mlp.down_proj", hidden, config.intermediate_size, config.mlp_bias)
        shapes[f"{layer}.input_layernorm.weight"] = (hidden,)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tied:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def load_folder(folder: Path, config: ModelConfig, dtype: torch.dtype) -> dict[str, Tensor]:
    """Reads a safetensors folder into memory of our own. Raises EngineRefused."""
    opened = [_open(path) for path in _safetensors_files(folder)]
    stored = _Stored({name: file for file in opened for name in file.keys()})  # noqa: SIM118 (not a mapping)
    return conform(stored, config, dtype, where=str(folder))


def map_shared(path: Path, config: ModelConfig, dtype: torch.dtype) -> dict[str, Tensor]:
    """Views of a segment in shared memory, without a copy where its dtype is ours. Raises EngineRefused."""
    try:
        segment = Segment(path, Manifest.load(path.parent))
        segment.verify()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise EngineRefused(f"{path}: not a weight segment with manifest.json beside it: {error}") from error
    return conform(_Held(segment.tensors), config, dtype, where=str(path))


class Source(Protocol):
    """Tensors by name; ``describe`` costs no read of their bytes."""

    def names(self) -> Iterable[str]: ...

    def describe(self, name: str) -> tuple[Shape, str]: ...

    def __getitem__(self, name: str) -> Tensor: ...


def conform(source: Source, config: ModelConfig, dtype: torch.dtype, where: str) -> dict[str, Tensor]:
    """The weights of ``config`` in ``dtype``: the source's own tensors where possible, else one flat copy of all.

    Raises EngineRefused, naming every tensor that is missing, unknown, or of another shape or kind of number.
    """
    names = [n for n in source.names() if not n.endswith("rotary_emb.inv_freq")]
    check_tensors({n: source.describe(n) for n in names}, config, where, whole=True)
    expected = expected_shapes(config)
    if isinstance(source, _Held) and all(source[name].dtype == dtype for name in expected):
        return {name: source[name] for name in expected}
    weights = flat_views(expected, dtype)
    for name, view in weights.items():
        view.copy_(source[name])
    return weights


def check_tensors(
    described: Mapping[str, tuple[Shape, str]], config: ModelConfig, where: str, *, whole: bool = False
) -> list[str]:
    """The names among ``described`` (shape, kind of number) that ``config`` reads, which may be all or (not ``whole``) some.

    Raises EngineRefused, naming every tensor that is missing, unknown, or of another shape or kind of number.
    """
    expected = expected_shapes(config)
    found = {n for n in described if not (config.tied and n == "lm_head.weight")}
    problems = [f"{name} is missing" for name in expected if name not in found] if whole else []
    problems += [f"{name} is unknown" for name in sorted(found - expected.keys())]
    for name in (n for n in expected if n in found):
        shape, kind = described[name]
        if shape != expected[name]:
            problems.append(
                f"{name} has shape {list(shape)}, {config.architecture} needs {list(expected[name])} (dtype {kind})"
            )
        elif kind not in FLOATS:
            problems.append(f"{name} {list(shape)} has dtype {kind}; a float dtype is needed")
    if problems:
        more = f" (and {len(problems) - 5} more)" if len(problems) > 5 else ""
        raise EngineRefused(f"{where}: {'; '.join(problems[:5])}{more}")
    return [n for n in expected if n in found]


def flat_views(shapes: Mapping[str, Shape], dtype: torch.dtype) -> dict[str, Tensor]:
    """Unwritten tensors in state-dict order in one block, so that q, k and v (gate and up) lie one after the other."""
    flat = torch.empty(sum(math.prod(shape) for shape in shapes.values()), dtype=dtype)
    views, offset = {}, 0
    for name, shape in shapes.items():
        views[name] = flat[offset : offset + math.prod(shape)].view(shape)
        offset += math.prod(shape)
    return views


def _safetensors_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.exists() else []
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise EngineRefused(f"{index}: not a safetensors index: {error}") from error
    files = [folder / name for name in names] or [folder / "model.safetensors"]
    if missing := [str(f) for f in files if not f.is_file()]:
        raise EngineRefused(f"{', '.join(missing)} not found; {folder} must hold the model as safetensors")
    return files


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise EngineRefused(f"{path}: {error}") from error


class _Stored:
    """Tensors in open safetensors files."""

    def __init__(self, files: Mapping[str, Any]) -> None:
        self._files = files

    def names(self) -> Iterable[str]:
        return self._files

    def describe(self, name: str) -> tuple[Shape, str]:
        part = self._files[name].get_slice(name)
        return tuple(part.get_shape()), part.get_dtype()

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor


class _Held:
    """Tensors in memory."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def names(self) -> Iterable[str]:
        return self._tensors

    def describe(self, name: str) -> tuple[Shape, str]:
        tensor = self._tensors[name]
        return tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]
