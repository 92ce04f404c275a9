"""The tokens of one step, laid out flat in the order of the running requests, and the attention over them.

Linear layers see one flat batch. Attention sees pieces: consecutive rows that compute one token each read their rows of the
cache together; requests that join read themselves; one that goes on from cached tokens reads those too. All write their
keys and values to the cache first.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from miles.engine.local.kv_cache import KVCache
from miles.engine.local.sequence import Sequence

PADDED_LENGTH = 64
"""Joining requests up to this long attend together, padded; longer ones together only with their equals."""
CALL_VALUES = 2**14
"""One more call of attention costs about as much as reading this many padded keys' numbers."""


@dataclass
class _Piece:
    """Consecutive rows that attend together: where their tokens and rows are, and each row's count and end."""

    token: int
    row: int
    counts: list[int]
    ends: list[int]
    mask: Tensor | None = None
    """What a query adds to its scores (one token each, or going on), or which places hold a token (joining)."""

    @property
    def tokens(self) -> slice:
        return slice(self.token, self.token + sum(self.counts))

    @property
    def rows(self) -> slice:
        return slice(self.row, self.row + len(self.counts))

    @property
    def width(self) -> int:
        return max(self.ends)

    @property
    def single(self) -> bool:
        return self.counts[0] == 1

    @property
    def fresh(self) -> bool:
        return self.counts == self.ends


class StepBatch:
    """What one forward takes: ``counts[i]`` tokens of ``sequences[i]``, from its first that isn't cached on.

    N tokens, S sequences that get all their tokens cached and so sample (``sampled``: their rows); tensors are int64.
    ``tokens_N``, ``positions_N``; ``last_S``: index of each one's last token; ``ends_S``: tokens each one has. With
    ``alone`` each request attends by itself, so that its result doesn't depend on who else runs.
    """

    def __init__(self, sequences: Seq[Sequence], counts: Seq[int], cache: KVCache, alone: bool = False) -> None:
        tokens: list[int] = []
        positions: list[int] = []
        rows: list[int] = []
        last: list[int] = []
        self.sampled: list[int] = []
        for row, (sequence, count) in enumerate(zip(sequences, counts, strict=True)):
            start, end = sequence.cached, sequence.cached + count
            tokens += sequence.tokens(start, end)
            positions += range(start, end)
            rows += [row] * count
            if end == sequence.length:
                self.sampled.append(row)
                last.append(len(tokens) - 1)
        self.tokens_N = torch.tensor(tokens)
        self.positions_N = torch.tensor(positions)
        self.last_S = torch.tensor(last, dtype=torch.int64)
        self.ends_S = self.positions_N[self.last_S] + 1
        self._rows_N = torch.tensor(rows)
        self._cache = cache
        ends = [s.cached + count for s, count in zip(sequences, counts, strict=True)]
        self._pieces = _cut(counts, ends, 0 if alone else cache.values_per_key)

    def attend(self, layer: int, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor) -> Tensor:
        """Keeps k and v of this step's tokens and returns their attention output (N, heads, head_dim)."""
        keys, values = self._cache.layer(layer)
        keys[self._rows_N, :, self.positions_N] = k_NKD
        values[self._rows_N, :, self.positions_N] = v_NKD
        outputs = [
            (_one_each if piece.single else _joining if piece.fresh else _going_on)(
                piece, q_NHD[piece.tokens], keys[piece.rows, :, : piece.width], values[piece.rows, :, : piece.width]
            )
            for piece in self._pieces
        ]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _one_each(piece: _Piece, q_NHD: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """One query per request; the heads that share a kv head are its query rows, so that keys are read once."""
    n, heads, d = q_NHD.shape
    if piece.mask is None and min(piece.ends) < piece.width:
        hidden = torch.arange(piece.width) >= torch.tensor(piece.ends)[:, None]
        piece.mask = torch.zeros(hidden.shape, dtype=q_NHD.dtype).masked_fill_(hidden, -torch.inf)[:, None, None]
    q = q_NHD.reshape(n, keys.shape[1], -1, d)
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=piece.mask).reshape(n, heads, d)


def _joining(piece: _Piece, q_NHD: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Causal attention of whole requests. Padding is on the right, where no real token looks."""
    padded = min(piece.ends) < piece.width
    shape = (len(piece.ends), piece.width, *q_NHD.shape[1:])
    if padded:
        if piece.mask is None:
            piece.mask = torch.arange(piece.width) < torch.tensor(piece.ends)[:, None]
        q_BTHD = q_NHD.new_zeros(shape)
        q_BTHD[piece.mask] = q_NHD
    else:
        q_BTHD = q_NHD.reshape(shape)
    out = F.scaled_dot_product_attention(q_BTHD.transpose(1, 2), keys, values, is_causal=True, enable_gqa=True)
    out_BTHD = out.transpose(1, 2)
    return out_BTHD[piece.mask] if padded else out_BTHD.reshape(q_NHD.shape)


def _going_on(piece: _Piece, q_NHD: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """The new tokens of one request see its cached ones and each other, causally."""
    if piece.mask is None:
        hidden = torch.arange(piece.width) > torch.arange(piece.width - len(q_NHD), piece.width)[:, None]
        piece.mask = torch.zeros(hidden.shape, dtype=q_NHD.dtype).masked_fill_(hidden, -torch.inf)
    out = F.scaled_dot_product_attention(
        q_NHD.transpose(0, 1)[None], keys, values, attn_mask=piece.mask, enable_gqa=True
    )
    return out[0].transpose(0, 1)


def _cut(counts: Seq[int], ends: Seq[int], values_per_key: int) -> list[_Piece]:
    """Cuts the rows into pieces; ``values_per_key`` 0 gives each row its own."""
    pieces: list[_Piece] = []
    token = 0
    for row, (count, end) in enumerate(zip(counts, ends, strict=True)):
        if pieces and values_per_key and _together(pieces[-1], count, end, values_per_key):
            pieces[-1].counts.append(count)
            pieces[-1].ends.append(end)
        else:
            pieces.append(_Piece(token, row, [count], [end]))
        token += count
    return pieces


def _together(piece: _Piece, count: int, end: int, values_per_key: int) -> bool:
    """Whether a further row attends with a piece, for less than a call of its own costs."""
    if piece.single or count == 1:
        padding = max(piece.width - end, (end - piece.width) * len(piece.counts))
        return piece.single and count == 1 and padding * values_per_key < CALL_VALUES
    return piece.fresh and count == end and max(piece.width, PADDED_LENGTH) == max(end, PADDED_LENGTH)
