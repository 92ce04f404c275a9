"""Logits of a step and one uniform number per request in; a token and its log-prob per request out.

The returned log-prob is that of the distribution a trainer compares with: log-softmax of logits / temperature, before
top-k, top-p, min-p and min_new_tokens take anything away (temperature 0 is greedy, and counts as 1 here). A token is drawn
by inverting the cumulative distribution at the request's uniform number, which is a function of its seed and the position
alone: what a request draws doesn't depend on who else runs.

A token survives truncation if it passes each test on that same distribution (SGLang's rule): it is among the ``top_k`` most
likely, the tokens more likely than it have less than ``top_p`` in sum, its probability is at least ``min_p`` times the
greatest.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from miles.engine.local.sequence import Sequence

HEAD = 256
"""Truncation looks at this many most likely tokens first, and sorts a whole row only where they aren't enough."""


@dataclass(frozen=True)
class Truncation:
    """Limits of the rows that truncate: ``rows`` (T) int64; the rest (T, 1). Off: vocabulary size, infinity, 0."""

    rows: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor


@dataclass(frozen=True)
class SamplingBatch:
    """The parameters of the B requests of a step, one row each; good as long as the same requests run."""

    sequences: list[Sequence]
    seeds: NDArray[np.uint64]
    temperature_B1: Tensor | None
    """None: 1 for all."""
    greedy_B: Tensor | None
    """None: nobody is greedy."""
    truncation: Truncation | None
    minimum: tuple[tuple[int, Sequence], ...]
    """Rows with a min_new_tokens, and their requests."""

    @classmethod
    def of(cls, sequences: Seq[Sequence]) -> SamplingBatch:
        params = [s.params for s in sequences]
        temperatures = [1.0 if p.greedy else p.temperature for p in params]
        greedy = [p.greedy for p in params]
        cut = [row for row, p in enumerate(params) if p.truncated]
        return cls(
            sequences=list(sequences),
            seeds=np.array([s.seed & (2**64 - 1) for s in sequences], dtype=np.uint64),
            temperature_B1=None if set(temperatures) <= {1.0} else torch.tensor(temperatures)[:, None],
            greedy_B=torch.tensor(greedy) if any(greedy) else None,
            truncation=_truncation(sequences, cut) if cut else None,
            minimum=tuple((row, s) for row, s in enumerate(sequences) if s.params.min_new_tokens),
        )


@dataclass(frozen=True)
class Drawn:
    """Per request: the token, its log-prob, and whether the logits were finite (neither counts where they weren't)."""

    tokens: list[int]
    log_probs: list[float]
    finite: list[bool]


def sample(logits_BV: Tensor, batch: SamplingBatch, uniform_B: Tensor) -> Drawn:
    """Draws one token per row; ``logits_BV`` and ``uniform_B`` (in (0, 1]) are float32. Overwrites the logits."""
    if batch.temperature_B1 is not None:
        logits_BV.div_(batch.temperature_B1)
    normaliser_B1 = logits_BV.logsumexp(dim=-1, keepdim=True)
    log_probs_BV = logits_BV.sub_(normaliser_B1)
    for row, sequence in batch.minimum:
        if len(sequence.output_ids) < sequence.params.min_new_tokens:
            log_probs_BV[row, sequence.stop_ids] = -torch.inf
    if batch.greedy_B is None:
        tokens_B = _draw(log_probs_BV, batch, uniform_B)
    else:
        tokens_B = log_probs_BV.argmax(dim=-1)
        if not batch.greedy_B.all():
            tokens_B = torch.where(batch.greedy_B, tokens_B, _draw(log_probs_BV, batch, uniform_B))
    chosen_B = log_probs_BV.gather(1, tokens_B[:, None])[:, 0]
    return Drawn(tokens_B.tolist(), chosen_B.tolist(), normaliser_B1[:, 0].isfinite().tolist())


def uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.uint64]) -> Tensor:
    """One number in (0, 1] per (seed, position): SplitMix64 (Steele et al. 2014), jumped to the position."""
    start = _mix(seeds + _GOLDEN)
    bits = _mix(start + (positions + np.uint64(1)) * _GOLDEN)
    return torch.from_numpy(((bits >> np.uint64(11)) + np.uint64(1)).astype(np.float64) * 2.0**-53).float()


def _draw(log_probs_BV: Tensor, batch: SamplingBatch, uniform_B: Tensor) -> Tensor:
    probs_BV = log_probs_BV.exp()
    tokens_B = _invert(probs_BV, uniform_B)
    if batch.truncation is not None:
        rows = batch.truncation.rows
        tokens_B[rows] = _draw_truncated(probs_BV[rows], batch.truncation, uniform_B[rows])
    return tokens_B


def _draw_truncated(probs_TV: Tensor, limits: Truncation, uniform_T: Tensor) -> Tensor:
    """Draws among the survivors, in order of probability. A row's way through here depends on that row alone."""
    head = min(HEAD, probs_TV.shape[1])
    ranked, ids = probs_TV.topk(head, dim=-1)
    kept, complete = _survivors(ranked, limits)
    tokens_T = ids.gather(1, _invert(kept, uniform_T)[:, None])[:, 0]
    for row in (~complete).nonzero()[:, 0].tolist() if head < probs_TV.shape[1] else ():
        one = slice(row, row + 1)
        ranked, ids = probs_TV[one].sort(dim=-1, descending=True, stable=True)
        limit = Truncation(limits.rows[one], limits.top_k[one], limits.top_p[one], limits.min_p[one])
        kept, _ = _survivors(ranked, limit)
        tokens_T[one] = ids[0, _invert(kept, uniform_T[one])]
    return tokens_T


def _survivors(ranked_TR: Tensor, limits: Truncation) -> tuple[Tensor, Tensor]:
    """Probabilities, most likely first, with 0 for what is cut; and whether each row's survivors all are among these."""
    before_TR = ranked_TR.cumsum(dim=-1) - ranked_TR
    keep_TR = before_TR < limits.top_p
    keep_TR &= torch.arange(ranked_TR.shape[1]) < limits.top_k
    keep_TR &= ranked_TR >= limits.min_p * ranked_TR[:, :1]
    return ranked_TR * keep_TR, ~keep_TR[:, -1]


def _invert(weights_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """The first index at which the running sum reaches ``uniform`` of the total: never one of weight 0."""
    running_BV = weights_BV.cumsum(dim=-1)
    reached = torch.searchsorted(running_BV, running_BV[:, -1:] * uniform_B[:, None])[:, 0]
    return reached.clamp_(max=weights_BV.shape[1] - 1)


def _truncation(sequences: Seq[Sequence], rows: list[int]) -> Truncation:
    params = [sequences[row].params for row in rows]
    return Truncation(
        rows=torch.tensor(rows),
        top_k=torch.tensor([p.top_k if p.top_k > 0 else 2**31 for p in params])[:, None],
        top_p=torch.tensor([p.top_p if p.top_p < 1 else float("inf") for p in params])[:, None],
        min_p=torch.tensor([float(p.min_p) for p in params])[:, None],
    )


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
