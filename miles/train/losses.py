"""Log-probs of trained tokens in, the loss and its metrics out: pure functions over flat tensors, one entry per token.

Only tokens with loss mask 1 are in these tensors: what is masked isn't multiplied by 0, it isn't there, so nothing of it
can reach the loss or the gradient. All metrics are sums (`SUMS`), which add up exactly over micro-batches and ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from miles.config.owners import TrainSettings

LOG_RATIO_BOUND = 20.0

SUMS = (
    "tokens", "loss", "pg_loss", "entropy_loss", "pg_clipfrac", "ppo_kl", "ois", "tis", "tis_clipfrac", "tis_abs",
    "train_rollout_logprob_abs_diff", "train_rollout_kl", "weights", "squared_weights",
)  # fmt: skip
NORMALISED = ("loss", "pg_loss")
TIS_METRICS = ("tis", "tis_clipfrac", "tis_abs")


@dataclass(frozen=True)
class LossInputs:
    """What the loss needs beside the policy's log-probs; each [N], float32.

    ``rollout_log_probs`` are the engine's; ``weights`` are those of `miles.train.normalisation.token_weights`.
    """

    rollout_log_probs: Tensor
    advantages: Tensor
    weights: Tensor


def ratio(log_probs: Tensor, base: Tensor) -> Tensor:
    """exp(log_probs - base), the log-ratio clamped to +-20 so that it stays finite; no gradient beyond the clamp."""
    return (log_probs - base).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def clipped_objective(ratio_N: Tensor, advantages_N: Tensor, train: TrainSettings) -> tuple[Tensor, Tensor]:
    """PPO's clipped loss per token, and whether it is the clipped term, [N].

    Sources: Schulman et al. 2017 (PPO, eq. 7); a higher upper bound from Yu et al. 2025 (DAPO); for negative advantages the
    dual clip ``eps_clip_c`` of Ye et al. 2020 (arXiv 1912.09729, eq. 5).
    """
    high = train.eps_clip if train.eps_clip_high is None else train.eps_clip_high
    plain = -advantages_N * ratio_N
    clipped = -advantages_N * ratio_N.clamp(1 - train.eps_clip, 1 + high)
    loss = torch.maximum(plain, clipped)
    if train.eps_clip_c is not None:
        loss = torch.where(advantages_N < 0, torch.minimum(loss, -advantages_N * train.eps_clip_c), loss)
    return loss, clipped > plain


def policy_loss(
    log_probs_N: Tensor, entropy_N: Tensor, inputs: LossInputs, own_N: Tensor | None, train: TrainSettings
) -> tuple[Tensor, Tensor]:
    """The part of the optimizer step's loss that these tokens make up (scalar), and its `SUMS` (float64, detached).

    ``own_N``: the trainer's log-probs before the first optimizer step of the batch; None: the current ones.

    The denominator of the ratio is the engine's log-prob; with ``use_tis`` it is the trainer's own, and the engine's comes in
    as a truncated importance weight, clamp(exp(own - engine), low, high). Source: Yao et al. 2025, "Your Efficient RL
    Framework Secretly Brings You Off-Policy RL Training".
    """
    rollout_N, current_N = inputs.rollout_log_probs, log_probs_N.detach()
    own_N = current_N if own_N is None else own_N
    old_N = own_N if train.use_tis else rollout_N
    ratio_N = ratio(log_probs_N, old_N)
    pg_N, clipped_N = clipped_objective(ratio_N, inputs.advantages, train)
    tis_N = ratio(own_N, rollout_N)
    kept_N = tis_N.clamp(train.tis_clip_low, train.tis_clip)
    if train.use_tis:
        pg_N = pg_N * kept_N
    pg_loss = (inputs.weights * pg_N).sum()
    loss = pg_loss
    if train.entropy_coef:
        loss = pg_loss - train.entropy_coef * (inputs.weights * entropy_N).sum()
    drift_N = (own_N - rollout_N).double()
    behaviour_N = ratio(current_N, rollout_N).double()
    sums = {
        "tokens": torch.ones_like(rollout_N), "loss": loss, "pg_loss": pg_loss, "entropy_loss": entropy_N,
        "pg_clipfrac": clipped_N, "ppo_kl": old_N - current_N, "ois": ratio_N, "tis": tis_N,
        "tis_clipfrac": kept_N != tis_N, "tis_abs": (tis_N - 1).abs(),
        "train_rollout_logprob_abs_diff": drift_N.abs(),
        "train_rollout_kl": drift_N.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).expm1() - drift_N,
        "weights": behaviour_N, "squared_weights": behaviour_N**2,
    }  # fmt: skip
    return loss, torch.stack([sums[name].detach().double().sum() for name in SUMS])


def metrics(sums: Tensor, train: TrainSettings) -> dict[str, float]:
    """`SUMS` of one optimizer step, added up over micro-batches and ranks, as metrics: means over its trained tokens.

    ``loss`` and ``pg_loss`` are normalised already. ``ess_ratio``: effective sample size of the ratios to the engine's
    policy over the number of tokens, (sum w)^2 / (n sum w^2). ``train_rollout_kl``: the k3 estimate of
    KL(engine, trainer), Schulman 2020.
    """
    total = dict(zip(SUMS, sums.tolist(), strict=True))
    tokens, weights, squared_weights = (total.pop(n) for n in ("tokens", "weights", "squared_weights"))
    hidden = () if train.use_tis else TIS_METRICS
    values = {n: v if n in NORMALISED else v / tokens for n, v in total.items() if n not in hidden}
    return values | {"ess_ratio": weights**2 / (tokens * squared_weights)}
