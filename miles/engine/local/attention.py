"""The tokens of one step, laid out flat: one per request that decodes, then all of each request that joins.

Linear layers see one flat batch. Attention differs: a decoding token reads its row of the cache, a joining request reads
only itself. Both write their keys and values to the cache first.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from miles.engine.local.kv_cache import KVCache
from miles.engine.local.sequence import Sequence

PADDED_LENGTH = 64
"""Joining requests up to this long attend together, padded; longer ones together only with their equals."""


@dataclass(frozen=True)
class _Joining:
    """Consecutive joining requests that attend together: where their tokens and rows are."""

    tokens: slice
    rows: slice
    width: int
    real_BT: Tensor | None
    """Which places hold a token, where the lengths differ."""


class StepBatch:
    """What one forward takes. N tokens, B requests; tensors are int64.

    ``tokens_N``, ``positions_N``; ``last_B``: index of each request's last token; ``ends_B``: tokens each request has.
    """

    def __init__(self, decoding: Seq[Sequence], joining: Seq[Sequence], cache: KVCache) -> None:
        lengths = [s.length for s in joining]
        first = len(decoding)
        tokens = [s.output_ids[-1] for s in decoding]
        positions = [s.length - 1 for s in decoding]
        rows = list(range(first))
        last = list(range(first))
        for row, sequence in enumerate(joining, start=first):
            tokens += sequence.prompt_ids
            tokens += sequence.output_ids
            positions += range(sequence.length)
            rows += [row] * sequence.length
            last.append(len(tokens) - 1)
        self.tokens_N = torch.tensor(tokens)
        self.positions_N = torch.tensor(positions)
        self.last_B = torch.tensor(last)
        self.ends_B = self.positions_N[self.last_B] + 1
        self._rows_N = torch.tensor(rows)
        self._cache = cache
        self._decoding = first
        self._longest = max(positions[:first], default=0) + 1
        self._mask: Tensor | None = None
        self._joining = _group(lengths, first)

    def attend(self, layer: int, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor) -> Tensor:
        """Keeps k and v of this step's tokens and returns their attention output (N, heads, head_dim)."""
        keys, values = self._cache.layer(layer)
        keys[self._rows_N, :, self.positions_N] = k_NKD
        values[self._rows_N, :, self.positions_N] = v_NKD
        if not self._joining:
            return self._decode(q_NHD, keys, values)
        out = torch.empty_like(q_NHD)
        if self._decoding:
            out[: self._decoding] = self._decode(q_NHD[: self._decoding], keys, values)
        for chunk in self._joining:
            out[chunk.tokens] = _prefill(chunk, q_NHD[chunk.tokens], keys, values)
        return out

    def _decode(self, q_NHD: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """One query per request; the heads that share a kv head are its query rows, so that keys are read once."""
        n, heads, d = q_NHD.shape
        keys, values = keys[:n, :, : self._longest], values[:n, :, : self._longest]
        if self._mask is None:
            visible = torch.arange(self._longest) < self.ends_B[:n, None]
            self._mask = torch.zeros(visible.shape, dtype=q_NHD.dtype).masked_fill_(~visible, -torch.inf)[:, None, None]
        q = q_NHD.reshape(n, keys.shape[1], -1, d)
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=self._mask).reshape(n, heads, d)


def _prefill(chunk: _Joining, q_NHD: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Causal attention of whole requests. Padding is on the right, where no real token looks."""
    keys, values = keys[chunk.rows, :, : chunk.width], values[chunk.rows, :, : chunk.width]
    shape = (keys.shape[0], chunk.width, *q_NHD.shape[1:])
    if chunk.real_BT is None:
        q_BTHD = q_NHD.reshape(shape)
    else:
        q_BTHD = q_NHD.new_zeros(shape)
        q_BTHD[chunk.real_BT] = q_NHD
    out = F.scaled_dot_product_attention(q_BTHD.transpose(1, 2), keys, values, is_causal=True, enable_gqa=True)
    out_BTHD = out.transpose(1, 2)
    return out_BTHD.reshape(q_NHD.shape) if chunk.real_BT is None else out_BTHD[chunk.real_BT]


def _group(lengths: Seq[int], decoding: int) -> list[_Joining]:
    """Cuts the joining requests into chunks that attend together; the first has row and token index ``decoding``."""
    chunks, token, row = [], decoding, decoding
    for _, equals in groupby(lengths, key=lambda length: max(length, PADDED_LENGTH)):
        group = list(equals)
        width, total = max(group), sum(group)
        real = None if total == width * len(group) else torch.arange(width) < torch.tensor(group)[:, None]
        chunks.append(_Joining(slice(token, token + total), slice(row, row + len(group)), width, real))
        token += total
        row += len(group)
    return chunks
