"""Log-probs of trained tokens in, the loss and its metrics out: pure functions over flat tensors, one entry per token.

Only tokens with loss mask 1 are in these tensors: what is masked isn't multiplied by 0, it isn't there, so nothing of it
can reach the loss or the gradient. All that leaves is sums, which add up exactly over micro-batches and ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from miles.config.owners import TrainSettings
from miles.train.kl import LOG_RATIO_BOUND, bounded_exp, kl_estimates


@dataclass(frozen=True)
class LossInputs:
    """What the loss needs beside the policy's log-probs; each [N], float32.

    ``rollout_log_probs`` are the engine's; ``weights`` are those of `miles.train.normalisation.token_weights`; ``lengths``
    how many of the tokens each sample has, in order. ``own_log_probs``: the trainer's before the first optimizer step of the
    batch; None: the current ones. ``reference_log_probs``: where there is a reference policy.
    """

    rollout_log_probs: Tensor
    advantages: Tensor
    weights: Tensor
    lengths: tuple[int, ...]
    own_log_probs: Tensor | None = None
    reference_log_probs: Tensor | None = None


@dataclass(frozen=True)
class Part:
    """What some tokens of an optimizer step make up of it. ``loss``: scalar, with gradient, to be added up.

    ``shares``: parts of metrics, already normalised as the loss is; ``sums``: over tokens, ``tokens`` their number. Both are
    scalars without gradient.
    """

    loss: Tensor
    shares: Mapping[str, Tensor] = field(default_factory=dict)
    sums: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Corrected:
    """A policy loss per token after an off-policy correction, [N]: ``kept`` says which tokens stay; ``sums`` of metrics."""

    loss: Tensor
    kept: Tensor
    sums: Mapping[str, Tensor]


@dataclass(frozen=True)
class PolicyHooks:
    """The user's parts of the policy loss, where there are any (`miles.train.loss_hooks`).

    ``correct``: (loss, trainer's, engine's log-probs), each [N], to the corrected loss. ``reduce``: (loss, kept), each [N],
    to the normalised sum.
    """

    correct: Callable[[Tensor, Tensor, Tensor], Corrected] | None = None
    reduce: Callable[[Tensor, Tensor | None], Tensor] | None = None


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


def sample_means(values_N: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """The mean over each sample's tokens, at each of its tokens, [N]."""
    counts = torch.tensor(lengths, device=values_N.device)
    rows_N = torch.repeat_interleave(torch.arange(len(lengths), device=values_N.device), counts)
    totals = values_N.new_zeros(len(lengths)).index_add(0, rows_N, values_N)
    return (totals / counts.clamp(min=1))[rows_N]


def moved_away(current_N: Tensor, inputs: LossInputs, delta: float) -> Tensor:
    """Which tokens are of samples with a negative advantage whose mean of log(engine / policy) is above ``delta``, [N].

    Source: DeepSeek-AI 2025, "DeepSeek-V3.2", off-policy sequence masking; the engine's log-probs are the old ones, so that
    both its staleness and its numerics count.
    """
    drift_N = sample_means(inputs.rollout_log_probs - current_N, inputs.lengths)
    return (inputs.advantages < 0) & (drift_N > delta)


def policy_loss(
    log_probs_N: Tensor, entropy_N: Tensor, inputs: LossInputs, train: TrainSettings, hooks: PolicyHooks | None = None
) -> Part:
    """The part of the optimizer step's loss that these tokens make up; whole samples only.

    The denominator of the ratio is the engine's log-prob; with ``use_tis`` it is the trainer's own, and the engine's comes in
    as a truncated importance weight, clamp(exp(own - engine), low, high), or as the user's correction. Source: Yao et al.
    2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training".

    ``gspo``: each token's ratio is the geometric mean over its sample. Source: Zheng et al. 2025, "Group Sequence Policy
    Optimization" (arXiv 2507.18071, eq. 5-7).
    """
    hooks = hooks or PolicyHooks()
    rollout_N, current_N = inputs.rollout_log_probs, log_probs_N.detach()
    own_N = current_N if inputs.own_log_probs is None else inputs.own_log_probs
    old_N = own_N if train.use_tis else rollout_N
    log_ratio_N = log_probs_N - old_N
    if train.advantage_estimator == "gspo":
        log_ratio_N = sample_means(log_ratio_N, inputs.lengths)
    ratio_N = bounded_exp(log_ratio_N)
    pg_N, clipped_N = clipped_objective(ratio_N, inputs.advantages, train)
    sums = {"ois": ratio_N, "pg_clipfrac": clipped_N, "ppo_kl": old_N - current_N}
    if train.use_opsm:
        sums["opsm_clipfrac"] = moved_away(current_N, inputs, train.opsm_delta)
        pg_N = pg_N.masked_fill(sums["opsm_clipfrac"], 0.0)

    kept_N, corrected_sums = None, {}
    if hooks.correct is not None:
        corrected = hooks.correct(pg_N, own_N, rollout_N)
        corrected_sums = dict(corrected.sums)
        if train.use_tis:
            pg_N, kept_N = corrected.loss, corrected.kept
    elif train.use_tis:
        pg_N, truncated = truncate(pg_N, own_N, rollout_N, train)
        sums |= truncated
    if hooks.reduce is not None:
        pg_loss = hooks.reduce(pg_N, kept_N)
    else:
        pg_loss = (inputs.weights * (pg_N if kept_N is None else torch.where(kept_N, pg_N, 0.0))).sum()

    loss, shares = pg_loss, {"pg_loss": pg_loss}
    if train.entropy_coef:
        loss = loss - train.entropy_coef * (inputs.weights * entropy_N).sum()
    if inputs.reference_log_probs is not None and train.use_kl_loss:
        kl_N = kl_estimates(log_probs_N, inputs.reference_log_probs, train.kl_loss_type)
        if train.use_unbiased_kl:
            kl_N = bounded_exp(log_probs_N - old_N) * kl_N
        shares["kl_loss"] = (inputs.weights * kl_N).sum()
        loss = loss + train.kl_loss_coef * shares["kl_loss"]
    sums |= {"entropy_loss": entropy_N} | mismatch(current_N, own_N, rollout_N)
    return Part(loss, {"loss": loss} | shares, total(sums, len(rollout_N)) | corrected_sums)


def truncate(pg_N: Tensor, own_N: Tensor, rollout_N: Tensor, train: TrainSettings) -> tuple[Tensor, dict[str, Tensor]]:
    """The policy loss under truncated importance weights, and their metrics, [N]."""
    tis_N = bounded_exp(own_N - rollout_N)
    kept_N = tis_N.clamp(train.tis_clip_low, train.tis_clip)
    return pg_N * kept_N, {"tis": tis_N, "tis_clipfrac": kept_N != tis_N, "tis_abs": (tis_N - 1).abs()}


def mismatch(current_N: Tensor, own_N: Tensor, rollout_N: Tensor) -> dict[str, Tensor]:
    """How far the trainer's log-probs are from the engine's, [N]; the last two make `ess_ratio`."""
    drift_N = (own_N - rollout_N).double()
    behaviour_N = bounded_exp(current_N - rollout_N).double()
    return {
        "train_rollout_logprob_abs_diff": drift_N.abs(),
        "train_rollout_kl": drift_N.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).expm1() - drift_N,
        "weights": behaviour_N,
        "squared_weights": behaviour_N**2,
    }


def sft_loss(log_probs_N: Tensor, entropy_N: Tensor, inputs: LossInputs) -> Part:
    """The negative log-likelihood of the trained tokens; advantages and the engine's log-probs are not read."""
    loss = -(inputs.weights * log_probs_N).sum()
    return Part(loss, {"loss": loss}, total({"entropy_loss": entropy_N}, len(log_probs_N)))


def total(values: Mapping[str, Tensor], tokens: int) -> dict[str, Tensor]:
    """Sums over tokens, float64 and detached, and ``tokens`` itself."""
    device = next(iter(values.values())).device
    count = torch.tensor(tokens, dtype=torch.float64, device=device)
    return {name: v.detach().double().sum() for name, v in values.items()} | {"tokens": count}


def metrics(shares: Mapping[str, float], sums: Mapping[str, float]) -> dict[str, float]:
    """Those of one optimizer step, from what its parts add up to over micro-batches and ranks; sums become token means.

    ``ess_ratio``: effective sample size of the ratios to the engine's policy over the number of tokens, (sum w)^2 / (n sum
    w^2). ``train_rollout_kl``: the k3 estimate of KL(engine, trainer), Schulman 2020.
    """
    hidden = ("tokens", "weights", "squared_weights")
    values = {name: value / sums["tokens"] for name, value in sums.items() if name not in hidden} | dict(shares)
    if "weights" in sums:
        values["ess_ratio"] = sums["weights"] ** 2 / (sums["tokens"] * sums["squared_weights"])
    return values
