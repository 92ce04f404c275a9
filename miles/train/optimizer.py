"""The trainable parameters and their gradients in; AdamW, and the norm of the gradients after clipping them, out."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import AdamW

from miles.config.owners import TrainSettings


def make_optimizer(model: Any, train: TrainSettings) -> AdamW:
    """AdamW over what isn't frozen. Weight decay is for matrices: norms and biases (one dimension) have none."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": train.weight_decay},
        {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
    ]
    betas = (train.adam_beta1, train.adam_beta2)
    return AdamW([g for g in groups if g["params"]], lr=train.lr, betas=betas, eps=train.adam_eps, fused=True)


def clip_gradients(optimizer: torch.optim.Optimizer, max_norm: float) -> float:
    """The norm of all gradients over all ranks, which are scaled down to ``max_norm`` where it is above that; 0: never.

    A norm that isn't finite is returned and nothing is scaled.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    norm = get_total_norm([p.grad for p in parameters if p.grad is not None])
    value = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    if max_norm < value < float("inf") and max_norm:
        clip_grads_with_norm_(parameters, max_norm, norm)
    return value
