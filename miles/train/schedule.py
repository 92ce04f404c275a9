"""The number of an optimizer step in, its learning rate out."""

from __future__ import annotations

import math

from miles.config.owners import TrainSettings


def learning_rate(step: int, total_steps: int, train: TrainSettings) -> float:
    """Rate of optimizer step ``step`` (from 0) of ``total_steps``.

    Warm-up rises linearly and reaches ``lr`` at its last step, so that no step has rate 0. What is left decays from ``lr``
    to ``min_lr``, which it would reach one step after the last; later steps keep ``min_lr``.
    """
    if step < train.lr_warmup_iters:
        return train.lr * (step + 1) / train.lr_warmup_iters
    if train.lr_decay_style == "constant":
        return train.lr
    done = min(1.0, (step - train.lr_warmup_iters) / max(1, total_steps - train.lr_warmup_iters))
    left = 1.0 - done if train.lr_decay_style == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return train.min_lr + (train.lr - train.min_lr) * left
