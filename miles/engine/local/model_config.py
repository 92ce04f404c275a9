"""A model folder's `config.json` in; the numbers that our forward needs out, or every reason why it can't run here."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from miles.errors import SettingsError

QK_NORM = {"LlamaForCausalLM": False, "Qwen3ForCausalLM": True}
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
ROPE_TYPES = ("default", "llama3")
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Llama3Scaling:
    """Stretches the slow rotations by ``factor`` (Llama 3.1; as in transformers' ``llama3`` rope type)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class ModelConfig:
    """A Llama or Qwen3 decoder. ``context_length`` in tokens; ``eos_ids`` end a response unless it ignores them."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    context_length: int
    tied: bool
    attention_bias: bool
    mlp_bias: bool
    qk_norm: bool
    rope_theta: float
    rope_scaling: Llama3Scaling | None
    dtype: torch.dtype
    eos_ids: frozenset[int]

    @classmethod
    def read(cls, folder: Path) -> ModelConfig:
        """Reads ``config.json`` and ``generation_config.json``. Raises SettingsError for what this engine can't run."""
        values = _read_json(folder / "config.json")
        generation = folder / "generation_config.json"
        eos = _ids(values.get("eos_token_id")) | (
            _ids(_read_json(generation).get("eos_token_id")) if generation.exists() else set()
        )
        if problems := _problems(values):
            raise SettingsError([f"{folder / 'config.json'}: {p}" for p in problems])
        rope = _rope(values)
        architecture = _architecture(values)
        heads = values["num_attention_heads"]
        return cls(
            architecture=architecture,
            vocab_size=values["vocab_size"],
            hidden_size=values["hidden_size"],
            intermediate_size=values["intermediate_size"],
            layers=values["num_hidden_layers"],
            heads=heads,
            kv_heads=values.get("num_key_value_heads") or heads,
            head_dim=values.get("head_dim") or values["hidden_size"] // heads,
            norm_eps=values.get("rms_norm_eps", 1e-6),
            context_length=values["max_position_embeddings"],
            tied=values.get("tie_word_embeddings", False),
            attention_bias=values.get("attention_bias", False),
            mlp_bias=values.get("mlp_bias", False),
            qk_norm=QK_NORM[architecture],
            rope_theta=float(rope.get("rope_theta", 10000.0)),
            rope_scaling=_scaling(rope) if _rope_type(rope) == "llama3" else None,
            dtype=DTYPES[_dtype(values)],
            eos_ids=frozenset(i for i in eos if 0 <= i < values["vocab_size"]),
        )

    @property
    def kv_values_per_token(self) -> int:
        """Numbers that the KV cache keeps for one token, all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim


def choose_dtype(requested: str, checkpoint: torch.dtype) -> torch.dtype:
    """``auto`` is bfloat16 for a bfloat16 checkpoint on a CPU with units for it, else float32."""
    if requested != "auto":
        return torch.float32 if requested == "float32" else torch.bfloat16
    cpu = torch.cpu.get_capabilities()
    has_bf16 = cpu.get("avx512_bf16") or cpu.get("amx_bf16")
    return torch.bfloat16 if checkpoint == torch.bfloat16 and has_bf16 else torch.float32


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text())
    except FileNotFoundError:
        raise SettingsError([f"{path} does not exist; --model-path needs a folder in Hugging Face format"]) from None
    except ValueError as error:
        raise SettingsError([f"{path} is not valid JSON: {error}"]) from error
    if not isinstance(values, dict):
        raise SettingsError([f"{path} holds a {type(values).__name__} where an object belongs"])
    return values


def _problems(values: dict[str, Any]) -> list[str]:
    """Everything in a config that our forward would compute wrongly."""
    problems = []
    if _architecture(values) not in QK_NORM:
        found = values.get("architectures") or values.get("model_type")
        problems.append(f"architecture {found} is not supported; {' and '.join(QK_NORM)} are")
    required = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    for name in (*required, "max_position_embeddings"):
        if not isinstance(values.get(name), int):
            problems.append(f"{name} is {values.get(name)!r}; a whole number is needed")
    if values.get("hidden_act", "silu") != "silu":
        problems.append(f"hidden_act {values['hidden_act']!r} is not supported; 'silu' is")
    layers = set(values.get("layer_types") or ()) - {"full_attention"}
    if values.get("use_sliding_window") or layers:
        found = ", ".join(sorted(layers)) or f"use_sliding_window with a window of {values.get('sliding_window')}"
        problems.append(f"{found} is not supported; full attention in every layer is")
    if values.get("num_experts") or values.get("num_local_experts"):
        problems.append("mixture-of-experts layers are not supported; dense ones are")
    if values.get("quantization_config"):
        problems.append("quantised weights are not supported; float32 and bfloat16 are")
    if _dtype(values) not in DTYPES:
        problems.append(f"dtype {_dtype(values)!r} is not supported; {', '.join(DTYPES)} are")
    return problems + _rope_problems(_rope(values))


def _rope_problems(rope: dict[str, Any]) -> list[str]:
    problems = []
    if _rope_type(rope) not in ROPE_TYPES:
        problems.append(f"rope type {_rope_type(rope)!r} is not supported; {' and '.join(ROPE_TYPES)} are")
    elif _rope_type(rope) == "llama3" and (missing := [f.name for f in fields(Llama3Scaling) if f.name not in rope]):
        problems.append(f"rope type 'llama3' lacks {', '.join(missing)}")
    if rope.get("partial_rotary_factor", 1) != 1:
        problems.append(f"partial_rotary_factor {rope['partial_rotary_factor']} is not supported; 1 is")
    return problems


def _architecture(values: dict[str, Any]) -> str:
    named = values.get("architectures") or [ARCHITECTURES.get(values.get("model_type", ""), "")]
    return str(named[0])


def _rope(values: dict[str, Any]) -> dict[str, Any]:
    """Rope parameters in one dict, from ``rope_parameters`` or the older ``rope_theta`` and ``rope_scaling``."""
    older = {name: values[name] for name in ("rope_theta", "partial_rotary_factor") if name in values}
    return older | (values.get("rope_parameters") or values.get("rope_scaling") or {})


def _rope_type(rope: dict[str, Any]) -> str:
    return str(rope.get("rope_type") or rope.get("type") or "default")


def _scaling(rope: dict[str, Any]) -> Llama3Scaling:
    return Llama3Scaling(**{f.name: rope[f.name] for f in fields(Llama3Scaling)})


def _dtype(values: dict[str, Any]) -> str:
    return str(values.get("dtype") or values.get("torch_dtype") or "float32")


def _ids(value: int | list[int] | None) -> set[int]:
    if value is None:
        return set()
    return {value} if isinstance(value, int) else set(value)
