"""Logits of a step and one uniform number per request in; a token and its log-prob per request out.

The returned log-prob is that of the distribution a trainer compares with: log-softmax of logits / temperature, before
penalties, top-k, top-p, min-p and min_new_tokens change anything (temperature 0 is greedy, and counts as 1 here). A token
is drawn by inverting the cumulative distribution at the request's uniform number, which is a function of its seed
and the position alone: what a request draws doesn't depend on who else runs.

A token survives truncation if it passes each test on that same distribution (SGLang's rule): it is among the ``top_k`` most
likely, the tokens more likely than it have less than ``top_p`` in sum, its probability is at least ``min_p`` times the
greatest. Penalties count the response's tokens, not the prompt's, and apply to the logits before the temperature (SGLang's
rule too): frequency and presence are subtracted, repetition divides positive logits and multiplies negative ones.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from miles.engine.local.sequence import Sequence

BLOCK = 256
"""Long rows are summed in blocks of this many tokens first, and only the drawn block is looked into."""
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
    edited: tuple[tuple[int, Sequence], ...]
    """Rows with penalties or a min_new_tokens, and their requests."""

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
            edited=tuple((r, s) for r, s in enumerate(sequences) if s.params.min_new_tokens or s.params.penalised),
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
    probs_BV = logits_BV.softmax(dim=-1)
    normaliser_B = logits_BV.amax(dim=-1) - probs_BV.amax(dim=-1).log()
    choice_BV = logits_BV
    if batch.edited:
        choice_BV = logits_BV.clone()
        for row, sequence in batch.edited:
            _edit(choice_BV[row], sequence)
            probs_BV[row] = choice_BV[row].softmax(dim=-1)
    if batch.greedy_B is None:
        tokens_B = _draw(probs_BV, batch, uniform_B)
    else:
        tokens_B = choice_BV.argmax(dim=-1)
        if not batch.greedy_B.all():
            tokens_B = torch.where(batch.greedy_B, tokens_B, _draw(probs_BV, batch, uniform_B))
    chosen_B = logits_BV.gather(1, tokens_B[:, None])[:, 0] - normaliser_B
    return Drawn(tokens_B.tolist(), chosen_B.tolist(), normaliser_B.isfinite().tolist())


def _edit(logits_V: Tensor, sequence: Sequence) -> None:
    """Applies a request's penalties and min_new_tokens to its tempered logits, in place."""
    params, temperature = sequence.params, 1.0 if sequence.params.greedy else sequence.params.temperature
    if params.penalised and sequence.output_ids:
        ids, counts = torch.unique(torch.tensor(sequence.output_ids), return_counts=True)
        raw = logits_V[ids] * temperature - params.frequency_penalty * counts - params.presence_penalty
        repetition = params.repetition_penalty
        logits_V[ids] = torch.where(raw > 0, raw / repetition, raw * repetition) / temperature
    if len(sequence.output_ids) < params.min_new_tokens:
        logits_V[sequence.stop_ids] = -torch.inf


def uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.uint64]) -> Tensor:
    """One number in (0, 1] per (seed, position): SplitMix64 (Steele et al. 2014), jumped to the position."""
    start = _mix(seeds + _GOLDEN)
    bits = _mix(start + (positions + np.uint64(1)) * _GOLDEN)
    return torch.from_numpy(((bits >> np.uint64(11)) + np.uint64(1)).astype(np.float64) * 2.0**-53).float()


def _draw(probs_BV: Tensor, batch: SamplingBatch, uniform_B: Tensor) -> Tensor:
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
    if weights_BV.shape[1] <= 2 * BLOCK:
        running_BV = weights_BV.cumsum(dim=-1)
        return _first_reaching(running_BV, running_BV[:, -1] * uniform_B)
    blocks_BNK = F.pad(weights_BV, (0, -weights_BV.shape[1] % BLOCK)).view(len(weights_BV), -1, BLOCK)
    running_BN = blocks_BNK.sum(dim=-1).cumsum(dim=-1)
    target_B = running_BN[:, -1] * uniform_B
    block_B = _first_reaching(running_BN, target_B)
    rows = torch.arange(len(block_B))
    before_B = torch.where(block_B > 0, running_BN[rows, block_B - 1], 0.0)
    inside_BK = blocks_BNK[rows, block_B].cumsum(dim=-1)
    return block_B * BLOCK + _first_reaching(inside_BK, target_B - before_B)


def _first_reaching(running_BN: Tensor, target_B: Tensor) -> Tensor:
    """The first index with at least the target, which rounding may have put beyond either end."""
    target_B = torch.minimum(target_B.clamp(min=torch.finfo(torch.float32).tiny), running_BN[:, -1])
    return torch.searchsorted(running_BN, target_B[:, None])[:, 0].clamp_(max=running_BN.shape[1] - 1)


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
