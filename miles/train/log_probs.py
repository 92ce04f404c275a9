"""Logits and token ids in, log-probs of the tokens and entropies of their distributions out.

In float32 whatever the logits are in, a few rows at a time: no float32 copy of all logits ever exists, and the backward
pass computes the probabilities again instead of keeping them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK_ELEMENTS = 2**22


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, targets_N: Tensor, temperature: float, rows: int) -> tuple[Tensor, Tensor]:
        log_probs, log_sums, entropies = [], [], []
        for start in range(0, max(1, len(targets_N)), rows):
            chunk = slice(start, start + rows)
            scaled = logits_NV[chunk].to(torch.float32, copy=True).div_(temperature)
            top = scaled.amax(-1)
            weights = (scaled - top[:, None]).exp_()
            weight_sum = weights.sum(-1)
            log_sum = top + weight_sum.log()
            log_probs.append(scaled.gather(1, targets_N[chunk, None])[:, 0] - log_sum)
            log_sums.append(log_sum)
            entropies.append(log_sum - torch.linalg.vecdot(weights, scaled) / weight_sum)
        entropy_N, log_sum_N = torch.cat(entropies), torch.cat(log_sums)
        ctx.save_for_backward(logits_NV, targets_N, log_sum_N, entropy_N)
        ctx.set_materialize_grads(False)
        ctx.temperature, ctx.rows = temperature, rows
        return torch.cat(log_probs), entropy_N

    @staticmethod
    def backward(ctx: Any, d_log_prob_N: Tensor | None, d_entropy_N: Tensor | None) -> tuple[Tensor, None, None, None]:
        """d log p(t) / dz_v = [v = t] - p_v; d H / dz_v = -p_v (log p_v + H); both over the temperature."""
        logits_NV, targets_N, log_sum_N, entropy_N = ctx.saved_tensors
        if d_log_prob_N is None:
            d_log_prob_N = torch.zeros_like(entropy_N)
        grad_NV = torch.empty_like(logits_NV)
        for start in range(0, len(targets_N), ctx.rows):
            chunk = slice(start, start + ctx.rows)
            log_p = logits_NV[chunk].to(torch.float32, copy=True).div_(ctx.temperature).sub_(log_sum_N[chunk, None])
            p = log_p.exp()
            slope = d_logit = d_log_prob_N[chunk, None] / ctx.temperature
            if d_entropy_N is not None:
                slope = (
                    log_p.add_(entropy_N[chunk, None]).mul_(d_entropy_N[chunk, None] / ctx.temperature).add_(d_logit)
                )
            grad_NV[chunk] = p.mul_(-slope).scatter_add_(1, targets_N[chunk, None], d_logit)
        return grad_NV, None, None, None


def token_log_probs(logits_NV: Tensor, targets_N: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probs of ``targets_N`` under ``softmax(logits / temperature)`` and its entropies in nats, both float32, [N]."""
    rows = max(1, CHUNK_ELEMENTS // logits_NV.shape[-1])
    log_probs_N, entropy_N = _TokenLogProbs.apply(logits_NV, targets_N, temperature, rows)  # type: ignore[no-untyped-call]
    return log_probs_N, entropy_N
