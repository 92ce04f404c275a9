"""Keys and values of the running requests: one block of bounded size per layer, cut into equal rows, one request each.

Rows 0..n-1 belong to the running requests, without holes, so that a decode step reads ``[:n, :, :longest]`` as a view.
When a request outgrows the rows, the block is cut anew into fewer, wider ones. Memory is reserved at the start and
touched only as it is used. Every number in a block is finite at all times: what is masked must not be NaN.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from miles.engine.local.model_config import ModelConfig

WIDTH_STEP = 128
"""Rows are a multiple of this many tokens wide, so that cutting anew stays a few percent of what attention reads."""


class KVCache:
    """Holds at most ``max_total_tokens`` tokens in at most ``max_rows`` rows."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, max_total_tokens: int, max_rows: int) -> None:
        self.max_total_tokens = max_total_tokens
        self.values_per_key = config.kv_heads * config.head_dim
        self._max_rows = max_rows
        self._row_shape = (config.kv_heads, config.head_dim)
        self._keys = [_zeros(max_total_tokens, config, dtype) for _ in range(config.layers)]
        self._values = [_zeros(max_total_tokens, config, dtype) for _ in range(config.layers)]
        self._width = self._width_for(1)

    def rows_for(self, longest: int) -> int:
        """How many rows there can be while the longest request has ``longest`` tokens."""
        return min(self._max_rows, self.max_total_tokens // self._width_for(longest))

    def fit(self, rows: int, longest: int, kept: int) -> None:
        """Makes ``rows`` rows of at least ``longest`` tokens, where `rows_for` allows it; the first ``kept`` survive."""
        if longest > self._width or rows > self.max_total_tokens // self._width:
            self._cut(self._width_for(longest), kept)

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer as views (rows, kv heads, width, head_dim)."""
        return self._rows(self._keys[index], self._width), self._rows(self._values[index], self._width)

    def copy(self, source: int, target: int, length: int) -> None:
        """Copies the first ``length`` tokens of a row to another row."""
        for block in (*self._keys, *self._values):
            rows = self._rows(block, self._width)
            rows[target, :, :length] = rows[source, :, :length]

    def read(self, row: int, length: int) -> list[Tensor]:
        """Copies of a row's first ``length`` tokens: one (kv heads, length, head_dim) per layer of keys, then values."""
        return [self._rows(block, self._width)[row, :, :length].clone() for block in (*self._keys, *self._values)]

    def write(self, row: int, held: list[Tensor], length: int) -> None:
        """Puts the first ``length`` tokens of what `read` gave into a row."""
        for block, part in zip((*self._keys, *self._values), held, strict=True):
            self._rows(block, self._width)[row, :, :length] = part[:, :length]

    def erase(self, row: int) -> None:
        """Zeroes a row that may hold NaN or infinity."""
        for block in (*self._keys, *self._values):
            self._rows(block, self._width)[row].zero_()

    def _width_for(self, longest: int) -> int:
        return min(math.ceil(max(longest, 1) / WIDTH_STEP) * WIDTH_STEP, self.max_total_tokens)

    def _rows(self, block: Tensor, width: int) -> Tensor:
        kv_heads, head_dim = self._row_shape
        rows = self.max_total_tokens // width
        return block[: rows * kv_heads * width * head_dim].view(rows, kv_heads, width, head_dim)

    def _cut(self, width: int, kept: int) -> None:
        columns = min(width, self._width)
        for block in (*self._keys, *self._values) if kept else ():
            survivors = self._rows(block, self._width)[:kept, :, :columns].clone()
            self._rows(block, width)[:kept, :, :columns] = survivors
        self._width = width


def _zeros(tokens: int, config: ModelConfig, dtype: torch.dtype) -> Tensor:
    """Zeroes that take no memory until they are written (calloc; torch.zeros would touch every page)."""
    nbytes = tokens * config.kv_heads * config.head_dim * dtype.itemsize
    return torch.from_numpy(np.zeros(nbytes, dtype=np.uint8)).view(dtype)
