"""Log-probs of the policy and of a reference in, an estimate of KL(policy, reference) per token out.

The tokens are samples of the policy; r is the ratio reference / policy of a token.
Sources: k1, k2, k3: Schulman 2020, "Approximating KL Divergence"; the clamped k3 (``low_var_kl``) is this ecosystem's.
"""

from __future__ import annotations

from torch import Tensor

LOG_RATIO_BOUND = 20.0
LOW_VAR_BOUND = 10.0


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp, its argument clamped to +-20 so that it stays finite; no gradient beyond the clamp."""
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def kl_estimates(log_probs_N: Tensor, reference_N: Tensor, kind: str) -> Tensor:
    """[N]. k1: -log r, unbiased, of either sign; k2: (log r)^2 / 2; k3: r - 1 - log r, unbiased and never negative;
    low_var_kl: k3 within +-10."""
    log_r_N = reference_N - log_probs_N
    if kind == "k1":
        return -log_r_N
    if kind == "k2":
        return log_r_N**2 / 2
    if kind == "low_var_kl":
        log_r_N = log_r_N.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    k3_N = bounded_exp(log_r_N) - 1 - log_r_N
    return k3_N.clamp(-LOW_VAR_BOUND, LOW_VAR_BOUND) if kind == "low_var_kl" else k3_N
