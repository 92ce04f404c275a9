"""Micro-batches in, the same with what has to be known before the first optimizer step out: log-probs and advantages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from miles.config.owners import TrainSettings
from miles.train.advantages import PENALISED, are_read, token_advantages, whiten
from miles.train.batch import MicroBatch
from miles.train.exchange import sum_over_ranks
from miles.train.kl import kl_estimates
from miles.train.model import Policy

Plans = list[list[MicroBatch]]
"""The micro-batches of this rank, by optimizer step."""


@torch.no_grad()
def prepare(
    plans: Plans, policy: Policy, reference: Policy | None, train: TrainSettings
) -> tuple[Plans, dict[str, float]]:
    """Adds own and reference log-probs and the advantages of tokens, each where it is needed; the metrics of that."""
    metrics = {}
    corrects = train.loss_type == "policy_loss" and (train.use_tis or train.get_mismatch_metrics)
    # With a single step and no penalty they are the current ones, which the loss has anyway.
    if corrects and (len(plans) > 1 or train.kl_coef):
        plans = _with_log_probs("own_log_probs", policy, plans)
    if reference is not None:
        plans = _with_log_probs("reference_log_probs", reference, plans)
        metrics["rollout/ref_log_probs"] = _mean_reference(plans)
    estimator = train.advantage_estimator
    by_token = train.normalize_advantages or estimator == "reinforce_plus_plus"
    if are_read(train) and (by_token or (train.kl_coef and estimator in PENALISED)):
        plans = _with_token_advantages(plans, train)
    return plans, metrics


def _with_log_probs(name: str, policy: Policy, plans: Plans) -> Plans:
    """With a policy's log-probs of the trained tokens."""

    def added(micro: MicroBatch) -> MicroBatch:
        more: Any = {name: policy.log_probs(micro)[0][micro.trained]}
        return replace(micro, inputs=replace(micro.inputs, **more))

    return [[added(micro) for micro in micro_batches] for micro_batches in plans]


def _mean_reference(plans: Plans) -> float:
    found = [m.inputs.reference_log_probs for micro_batches in plans for m in micro_batches]
    own = [(float(log_probs.double().sum()), len(log_probs)) for log_probs in found if log_probs is not None]
    total, tokens = sum_over_ranks(np.sum(own, axis=0, dtype=np.float64))
    return float(total / tokens)


def _with_token_advantages(plans: Plans, train: TrainSettings) -> Plans:
    """With the advantages that depend on tokens; those of samples that nobody has scored stay 0."""
    micros = [micro for micro_batches in plans for micro in micro_batches]
    samples = [sample for micro in micros for sample in micro.members]
    kls = [kl_A for micro in micros for kl_A in _kl(micro, train)]
    values = [
        token_advantages(sample.advantage, kl_A, train) if sample.scored else np.zeros(len(kl_A))
        for sample, kl_A in zip(samples, kls, strict=True)
    ]
    if train.normalize_advantages:
        scored = [i for i, sample in enumerate(samples) if sample.scored]
        for i, white in zip(scored, whiten([values[i] for i in scored], sum_over_ranks), strict=True):
            values[i] = white
    left = iter(values)

    def filled(micro: MicroBatch) -> MicroBatch:
        advantages_N = torch.from_numpy(np.concatenate([next(left) for _ in micro.members]))
        return replace(micro, inputs=replace(micro.inputs, advantages=advantages_N.to(micro.inputs.advantages)))

    return [[filled(micro) for micro in micro_batches] for micro_batches in plans]


def _kl(micro: MicroBatch, train: TrainSettings) -> list[npt.NDArray[np.float64]]:
    """KL to the reference at the tokens of each sample, of the policy that is the loss's denominator; 0 without one."""
    inputs = micro.inputs
    old_N = inputs.own_log_probs if train.use_tis and inputs.own_log_probs is not None else inputs.rollout_log_probs
    kl_N = torch.zeros_like(old_N)
    if train.kl_coef and inputs.reference_log_probs is not None:
        kl_N = kl_estimates(old_N, inputs.reference_log_probs, train.kl_loss_type)
    return [kl_A.double().cpu().numpy() for kl_A in torch.split(kl_N, list(inputs.lengths))]
