"""Token ids and positions of one step in, float32 logits out: a Llama or Qwen3 decoder over borrowed weights.

A `Model` is immutable. New weights make a new one; adopting it is a pointer swap. In float32 it reads the weights where
they lie. In bfloat16 it packs each matrix once into the order in which oneDNN reads it, which makes the products of a
decode step half as fast again, and keeps nothing of the originals.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from miles.engine.local.model_config import Llama3Scaling, ModelConfig

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""``attend(layer, q_NHD, k_NKD, v_NKD)`` keeps k and v and returns the attention output, of q's shape."""


Linear = Callable[[Tensor], Tensor]
PACKED_FOR = 32
"""Rows that the packed order is made for; any number may come."""

FEWEST_ROWS = 4
"""With fewer, float32 products take another way, which gives a row other bits (measured with MKL)."""


@dataclass(frozen=True)
class _Layer:
    input_norm: Tensor
    qkv: Linear
    qk_norm: Tensor | None
    out: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


class Model:
    """The decoder of ``config`` over ``weights`` (Hugging Face names), which it never writes."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, Tensor]) -> None:
        self._config = config
        embed = weights["model.embed_tokens.weight"]
        self._embed = _own(embed)
        self._head = _linear(embed if config.tied else weights["lm_head.weight"], None)
        self._norm = _own(weights["model.norm.weight"])
        self._layers = [_layer(config, weights, f"model.layers.{i}") for i in range(config.layers)]
        self._inverse_frequencies = inverse_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)

    def forward(self, tokens_N: Tensor, positions_N: Tensor, last_S: Tensor, attend: Attend) -> Tensor:
        """Logits (S, vocab) in float32 of the tokens at the indices ``last_S``; N counts all tokens of the step."""
        config = self._config
        x = F.embedding(tokens_N, self._embed)
        rotation = self._rotation(positions_N, x.dtype)
        for index, layer in enumerate(self._layers):
            h = _rms_norm(x, layer.input_norm, config.norm_eps)
            x = x + self._attention(index, layer, h, rotation, attend)
            h = _rms_norm(x, layer.mlp_norm, config.norm_eps)
            gate, up = layer.gate_up(h).chunk(2, dim=-1)
            x = x + layer.down(F.silu(gate).mul_(up))
        x = _rms_norm(x[last_S], self._norm, config.norm_eps)
        return self._head(x).float()

    def _attention(
        self, index: int, layer: _Layer, h: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend
    ) -> Tensor:
        heads, kv, d = self._config.heads, self._config.kv_heads, self._config.head_dim
        qkv_NHD = layer.qkv(h).view(-1, heads + 2 * kv, d)
        qk, v = qkv_NHD[:, : heads + kv], qkv_NHD[:, heads + kv :]
        if layer.qk_norm is not None:
            qk = _rms_norm(qk, layer.qk_norm, self._config.norm_eps)
        qk = _rotate(qk, *rotation)
        mixed = attend(index, qk[:, :heads], qk[:, heads:], v)
        return layer.out(mixed.reshape(-1, heads * d))

    def _rotation(self, positions_N: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosine and sine (N, 1, head_dim), computed in float32 and rounded like transformers does."""
        angles = positions_N[:, None].float() * self._inverse_frequencies
        angles = torch.cat((angles, angles), dim=-1)[:, None]
        return angles.cos().to(dtype), angles.sin().to(dtype)


def inverse_frequencies(head_dim: int, theta: float, scaling: Llama3Scaling | None) -> Tensor:
    """Angle per position of each rotated pair, float32 of shape (head_dim / 2).

    RoPE: Su et al. 2021; ``scaling``: Llama 3.1, slow rotations stretched by ``factor``, smoothly in between.
    """
    frequencies = 1.0 / theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
    if scaling is None:
        return frequencies
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * kept + frequencies / scaling.factor * (1 - kept)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalises the last dimension in float32; the weight is applied in x's own dtype, as transformers does."""
    return F.rms_norm(x, x.shape[-1:], None, eps) * weight


def _rotate(x_NHD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x_NHD.chunk(2, dim=-1)
    return x_NHD * cos + torch.cat((-second, first), dim=-1) * sin


def _layer(config: ModelConfig, weights: Mapping[str, Tensor], name: str) -> _Layer:
    attention, mlp = f"{name}.self_attn", f"{name}.mlp"

    def linear(*parts: str) -> Linear:
        biases = [weights[f"{p}.bias"] for p in parts if f"{p}.bias" in weights]
        return _linear(_joined([weights[f"{p}.weight"] for p in parts]), _own(_joined(biases)) if biases else None)

    qk_norm = None
    if config.qk_norm:
        q, k = weights[f"{attention}.q_norm.weight"], weights[f"{attention}.k_norm.weight"]
        qk_norm = torch.cat((q.expand(config.heads, -1), k.expand(config.kv_heads, -1)))
    return _Layer(
        input_norm=_own(weights[f"{name}.input_layernorm.weight"]),
        qkv=linear(*(f"{attention}.{p}_proj" for p in "qkv")),
        qk_norm=qk_norm,
        out=linear(f"{attention}.o_proj"),
        mlp_norm=_own(weights[f"{name}.post_attention_layernorm.weight"]),
        gate_up=linear(f"{mlp}.gate_proj", f"{mlp}.up_proj"),
        down=linear(f"{mlp}.down_proj"),
    )


def _packs(dtype: torch.dtype) -> bool:
    """In float32 packing gains nothing on the CPUs that it was measured on."""
    return dtype == torch.bfloat16 and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]


def _own(weight: Tensor) -> Tensor:
    """A copy where matrices are packed, so that nothing keeps the originals alive."""
    return weight.clone() if _packs(weight.dtype) else weight


def _linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """x (N, in) to (N, out). A row's result doesn't depend on the other rows."""
    if not _packs(weight.dtype):
        return lambda x: _plain_linear(x, weight, bias)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_FOR)
    product = torch.ops.mkldnn._linear_pointwise.default

    def apply(x: Tensor) -> Tensor:
        y: Tensor = product(x, packed, bias, "none", [], "")
        return y

    return apply


def _plain_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    missing = FEWEST_ROWS - len(x)
    if missing <= 0:
        return F.linear(x, weight, bias)
    return F.linear(F.pad(x, (0, 0, 0, missing)), weight, bias)[: len(x)]


def _joined(parts: list[Tensor]) -> Tensor:
    """The parts stacked along dimension 0: a view where they lie one after the other in memory, else a copy."""
    if all(
        a.data_ptr() + a.nbytes == b.data_ptr() and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
        for a, b in pairwise(parts)
    ):
        first = parts[0]
        rows = sum(p.shape[0] for p in parts)
        return first.as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())
    return torch.cat(parts)
