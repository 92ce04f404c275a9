"""An off-policy correction for ``--custom-tis-function-path``: importance weights, rejection sampling and a veto.

The weight of a token is exp(trainer - engine), of the token itself or of its whole sample: the product over its trained
tokens (``sequence``) or their geometric mean (``geometric``). What ``mis.yaml`` sets, hooks find in ``args``.

Sources: truncated weights: Ionides 2008; Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL
Training"; masked ones: Ling Team 2025, "Every Step Evolves" (IcePop); per sample, and rejection: Liu et al. 2025, "When Speed
Kills Stability".
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

LOG_RATIO_BOUND = 20.0


def correct(
    *,
    args: Any,
    pg_loss: Tensor,
    train_log_probs: list[Tensor],
    rollout_log_probs: list[Tensor],
    loss_masks: list[Tensor],
    **_: Any,
) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
    """The weighted loss, [R] for the R response tokens end to end; masks without what is rejected; metrics per token."""
    if getattr(args, "tis_batch_normalize", False):
        raise ValueError("tis_batch_normalize would make the loss depend on the size of micro-batches; false works")
    log_ratios = [(t - r) * m for t, r, m in zip(train_log_probs, rollout_log_probs, loss_masks, strict=True)]
    weights, masks = [], []
    for log_ratio, mask in zip(log_ratios, loss_masks, strict=True):
        weights.append(bounded(at_level(log_ratio, mask, args.tis_level), args))
        masks.append(mask * accepted(log_ratio, mask, args))
    weight, kept = torch.cat(weights), torch.cat(masks)
    return pg_loss * weight, masks, {"mis_weight": weight, "mis_kept": (kept != 0).float()}


def at_level(log_ratio: Tensor, mask: Tensor, level: str) -> Tensor:
    """The ratio trainer / engine at each token of one sample, [tokens]."""
    if level == "token":
        found = log_ratio
    elif level in ("sequence", "geometric"):
        total = log_ratio.sum() if level == "sequence" else log_ratio.sum() / mask.sum().clamp(min=1)
        found = total.expand_as(log_ratio)
    else:
        raise ValueError(f"level {level!r}: token, sequence and geometric work")
    return found.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def bounded(ratio: Tensor, args: Any) -> Tensor:
    """The weights: cut at the upper bound (``truncate``), at both (``clip``), or 0 outside of them (``mask``)."""
    low, high = args.tis_lower_bound, args.tis_upper_bound
    if args.tis_mode == "truncate":
        return ratio.clamp(max=high)
    if args.tis_mode == "clip":
        return ratio.clamp(low, high)
    if args.tis_mode == "mask":
        return torch.where((ratio >= low) & (ratio <= high), ratio, 0.0)
    raise ValueError(f"tis_mode {args.tis_mode!r}: truncate, clip and mask work")


def accepted(log_ratio: Tensor, mask: Tensor, args: Any) -> Tensor:
    """Which tokens of one sample are trained, [tokens]: rejection within bounds, then the veto of a single token."""
    kept = torch.ones_like(mask, dtype=torch.bool)
    if args.use_rs:
        ratio = at_level(log_ratio, mask, args.rs_level)
        kept = (ratio >= args.rs_lower_bound) & (ratio <= args.rs_upper_bound)
    if args.rs_veto_threshold is not None:
        kept = kept & bool((at_level(log_ratio, mask, "token") >= args.rs_veto_threshold).all())
    return kept
