"""Loss, gradient and metrics equal a float64 numpy reference, and add up exactly over any cut."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from miles.config.owners import TrainSettings
from miles.train.kl import kl_estimates
from miles.train.losses import LossInputs, metrics, policy_loss, sft_loss

N = 40


def tokens(seed=0, n=N):
    rng = np.random.default_rng(seed)
    rollout = rng.normal(-2, 1, n)
    return {
        "log_probs": rollout + rng.normal(0, 0.4, n),
        "own": rollout + rng.normal(0, 0.4, n),
        "rollout": rollout,
        "entropy": rng.uniform(0, 3, n),
        "advantages": rng.normal(0, 1, n),
        "weights": rng.uniform(0.01, 0.05, n),
    }


def as_tensors(values):
    return {name: torch.tensor(v, dtype=torch.float32) for name, v in values.items()}


def run(values, train, *, own=True, lengths=None):
    """(loss, gradient of the log-probs, everything that is added up for metrics)"""
    t = as_tensors(values)
    log_probs = t["log_probs"].requires_grad_()
    inputs = LossInputs(
        t["rollout"],
        t["advantages"],
        t["weights"],
        lengths or (len(log_probs),),
        t["own"] if own else None,
        t.get("ref"),
    )
    part = policy_loss(log_probs, t["entropy"], inputs, train)
    part.loss.backward()
    shares, sums = ({n: v.item() for n, v in named.items()} for named in (part.shares, part.sums))
    return part.loss.item(), log_probs.grad.numpy(), (shares, sums)


def reference(values, train):
    """Token by token in float64, with the gradient written out by hand."""
    loss, gradient = 0.0, []
    low, high = 1 - train.eps_clip, 1 + (train.eps_clip_high or train.eps_clip)
    for current, own, rollout, entropy, advantage, weight in zip(*(values[k] for k in values), strict=True):
        old = own if train.use_tis else rollout
        ratio = math.exp(current - old)
        objective, slope = ratio * advantage, ratio * advantage
        if advantage > 0 and ratio > high:
            objective, slope = high * advantage, 0.0
        if advantage < 0 and ratio < low:
            objective, slope = low * advantage, 0.0
        if train.eps_clip_c and advantage < 0 and ratio > train.eps_clip_c:
            objective, slope = train.eps_clip_c * advantage, 0.0
        tis = min(max(math.exp(own - rollout), train.tis_clip_low), train.tis_clip) if train.use_tis else 1.0
        loss -= weight * (tis * objective + train.entropy_coef * entropy)
        gradient.append(-weight * tis * slope)
    return loss, np.array(gradient)


@pytest.mark.parametrize(
    "train",
    [
        TrainSettings(),
        TrainSettings(eps_clip=0.1, eps_clip_high=0.3),
        TrainSettings(eps_clip_c=1.5),
        TrainSettings(use_tis=True, tis_clip=1.2, tis_clip_low=0.8),
        TrainSettings(use_tis=True, eps_clip_c=1.3, entropy_coef=0.1),
    ],
    ids=["ppo", "clip-higher", "dual-clip", "tis", "tis-dual-entropy"],
)
def test_loss_and_gradient_equal_the_reference(train):
    values = tokens()
    loss, gradient, _ = run(values, train)
    expected_loss, expected_gradient = reference(values, train)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    np.testing.assert_allclose(gradient, expected_gradient, rtol=2e-5, atol=1e-8)


def test_huge_ratio_costs_neither_loss_nor_gradient_of_the_other_token():
    """A log-ratio of 1000 is clamped to 20: loss and gradient stay finite, and a positive advantage clips it anyway."""
    values = {k: v[:2] for k, v in tokens().items()} | {
        "rollout": np.array([-1000.0, 0.0]), "log_probs": np.array([0.0, 0.0]),
        "advantages": np.array([1.0, 1.0]), "weights": np.array([0.5, 0.5]),
    }  # fmt: skip
    loss, gradient, sums = run(values, TrainSettings())
    assert loss == pytest.approx(-0.5 * 1.2 - 0.5)
    np.testing.assert_allclose(gradient, [0.0, -0.5])
    assert all(math.isfinite(v) for named in sums for v in named.values())


def test_negative_advantage_of_a_huge_ratio_is_bounded():
    values = {k: v[:1] for k, v in tokens().items()} | {
        "rollout": np.array([-1000.0]), "log_probs": np.array([0.0]), "advantages": np.array([-1.0]),
    }  # fmt: skip
    loss, gradient, _ = run(values, TrainSettings())
    assert loss == pytest.approx(values["weights"][0] * math.exp(20), rel=1e-5)
    assert gradient.tolist() == [0.0]


def test_without_own_log_probs_the_current_ones_are_the_denominator_of_tis():
    values = tokens()
    values["own"] = values["log_probs"]
    train = TrainSettings(use_tis=True)
    given, free = run(values, train), run(values, train, own=False)
    assert given[0] == free[0]
    np.testing.assert_array_equal(given[1], free[1])


def test_tis_weight_has_no_gradient():
    values = tokens(n=1) | {"advantages": np.array([1.0]), "weights": np.array([1.0]), "rollout": np.array([-1.0])}
    values["own"] = values["log_probs"] = np.array([-1.3])
    _, gradient, _ = run(values, TrainSettings(use_tis=True), own=False)
    assert gradient[0] == pytest.approx(-math.exp(-0.3))


def test_metrics_equal_the_reference():
    values = tokens()
    train = TrainSettings(use_tis=True, tis_clip=1.5, tis_clip_low=0.5)
    _, _, sums = run(values, train)
    found = metrics(*sums)
    current, own, rollout = values["log_probs"], values["own"], values["rollout"]
    ratio, tis, behaviour = np.exp(current - own), np.exp(own - rollout), np.exp(current - rollout)
    clipped = np.where(values["advantages"] > 0, ratio > 1.2, ratio < 0.8)
    expected = {
        "entropy_loss": values["entropy"].mean(),
        "pg_clipfrac": clipped.mean(),
        "ppo_kl": (own - current).mean(),
        "ois": ratio.mean(),
        "tis": tis.mean(),
        "tis_clipfrac": ((tis < 0.5) | (tis > 1.5)).mean(),
        "tis_abs": np.abs(tis - 1).mean(),
        "train_rollout_logprob_abs_diff": np.abs(own - rollout).mean(),
        "train_rollout_kl": (tis - 1 - np.log(tis)).mean(),
        "ess_ratio": behaviour.sum() ** 2 / (len(behaviour) * (behaviour**2).sum()),
    }
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-4), name
    assert found["loss"] == found["pg_loss"]


def test_tis_metrics_are_there_only_with_tis():
    _, _, sums = run(tokens(), TrainSettings())
    assert not {"tis", "tis_clipfrac", "tis_abs"} & metrics(*sums).keys()


@pytest.mark.parametrize("cut", [0, 1, 17, N])
def test_loss_gradient_and_sums_add_up_over_any_cut(cut):
    values, train = tokens(), TrainSettings(use_tis=True, eps_clip_c=2.0, entropy_coef=0.01)
    whole = run(values, train)
    parts = [run({k: v[part] for k, v in values.items()}, train) for part in (slice(0, cut), slice(cut, N))]
    assert sum(p[0] for p in parts) == pytest.approx(whole[0], rel=1e-6)
    np.testing.assert_allclose(np.concatenate([p[1] for p in parts]), whole[1], rtol=1e-6)
    for kind in (0, 1):
        for name, value in whole[2][kind].items():
            assert sum(p[2][kind][name] for p in parts) == pytest.approx(value, rel=1e-5, abs=1e-6), name


def test_equal_policies_differ_by_nothing():
    values = tokens()
    values["log_probs"] = values["own"] = values["rollout"]
    train = TrainSettings(use_tis=True)
    found = metrics(*run(values, train)[2])
    assert found["train_rollout_logprob_abs_diff"] == found["train_rollout_kl"] == found["ppo_kl"] == 0.0
    assert found["ess_ratio"] == found["ois"] == found["tis"] == 1.0


# ---- sequences, KL, masking: each against its formula in float64

LENGTHS = (1, 12, 0, 7, 20)


def by_sample(values, of):
    """``of`` each sample's slice, repeated at its tokens."""
    bounds = np.cumsum([0, *LENGTHS])
    parts = [np.full(b - a, of(slice(a, b))) for a, b in pairwise(bounds) if b > a]
    return np.concatenate(parts)


def slope_of(loss_of, log_probs, step=1e-6):
    """Central differences of a float64 loss."""
    slopes = []
    for i in range(len(log_probs)):
        moved = [loss_of(log_probs + sign * step * (np.arange(len(log_probs)) == i)) for sign in (1, -1)]
        slopes.append((moved[0] - moved[1]) / (2 * step))
    return np.array(slopes)


def clipped64(ratio, advantages, low, high):
    return np.maximum(-advantages * ratio, -advantages * np.clip(ratio, low, high))


def assert_is(loss_of, values, train):
    loss, gradient, sums = run(values, train, lengths=LENGTHS)
    assert loss == pytest.approx(loss_of(values["log_probs"]), rel=1e-5)
    np.testing.assert_allclose(gradient, slope_of(loss_of, values["log_probs"]), rtol=1e-3, atol=1e-6)
    return metrics(*sums)


@pytest.mark.parametrize("use_tis", [False, True])
def test_gspo_ratio_is_the_geometric_mean_over_the_sample(use_tis):
    values = tokens()
    values["advantages"] = by_sample(values, lambda part: values["advantages"][part.start])
    old = values["own"] if use_tis else values["rollout"]
    tis = np.clip(np.exp(values["own"] - values["rollout"]), 0, 2) if use_tis else 1.0

    def loss_of(log_probs):
        ratio = np.exp(by_sample(values, lambda part: (log_probs - old)[part].mean()))
        return (values["weights"] * tis * clipped64(ratio, values["advantages"], 0.9, 1.15)).sum()

    train = TrainSettings(advantage_estimator="gspo", eps_clip=0.1, eps_clip_high=0.15, use_tis=use_tis)
    found = assert_is(loss_of, values, train)
    ratio = np.exp(by_sample(values, lambda part: (values["log_probs"] - old)[part].mean()))
    assert found["ois"] == pytest.approx(ratio.mean(), rel=1e-5)


KINDS = {
    "k1": lambda r: -np.log(r),
    "k2": lambda r: np.log(r) ** 2 / 2,
    "k3": lambda r: r - 1 - np.log(r),
    "low_var_kl": lambda r: np.clip(r - 1 - np.log(r), -10, 10),
}


@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_kl_loss_is_its_estimate_weighted_as_the_loss(kind, unbiased):
    values = tokens() | {"ref": np.random.default_rng(3).normal(-2, 1.5, N)}

    def kl_of(log_probs):
        kl = KINDS[kind](np.exp(values["ref"] - log_probs))
        return (values["weights"] * kl * (np.exp(log_probs - values["rollout"]) if unbiased else 1.0)).sum()

    def loss_of(log_probs):
        policy = clipped64(np.exp(log_probs - values["rollout"]), values["advantages"], 0.8, 1.2)
        return (values["weights"] * policy).sum() + 0.3 * kl_of(log_probs)

    train = TrainSettings(use_kl_loss=True, kl_loss_coef=0.3, kl_loss_type=kind, use_unbiased_kl=unbiased)
    found = assert_is(loss_of, values, train)
    assert found["kl_loss"] == pytest.approx(kl_of(values["log_probs"]), rel=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("distance", [-1000.0, 0.0, 1000.0])
def test_kl_of_far_policies_is_finite_and_0_of_equal_ones(kind, distance):
    log_probs = torch.tensor([-1.0], requires_grad=True)
    kl = kl_estimates(log_probs, log_probs.detach() + distance, kind)
    kl.sum().backward()
    assert kl.isfinite().all() and log_probs.grad.isfinite().all()
    assert distance or kl.item() == 0


def test_samples_of_negative_advantage_that_the_policy_left_are_masked_whole():
    values = tokens()
    values["advantages"] = by_sample(values, lambda part: -1.0 if part.start % 2 else 1.0)
    drift = by_sample(values, lambda part: (values["rollout"] - values["log_probs"])[part].mean())
    delta = float(np.unique(drift[values["advantages"] < 0]).mean())
    masked = (values["advantages"] < 0) & (drift > delta)
    assert 0 < masked.sum() < (values["advantages"] < 0).sum()

    def loss_of(log_probs):
        policy = clipped64(np.exp(log_probs - values["rollout"]), values["advantages"], 0.8, 1.2)
        return (values["weights"] * np.where(masked, 0, policy)).sum()

    found = assert_is(loss_of, values, TrainSettings(use_opsm=True, opsm_delta=delta))
    assert found["opsm_clipfrac"] == pytest.approx(masked.mean())


def test_sft_loss_is_the_weighted_log_likelihood():
    values = tokens()
    t = as_tensors(values)
    log_probs = t["log_probs"].requires_grad_()
    part = sft_loss(log_probs, t["entropy"], LossInputs(t["rollout"] * 1e30, t["advantages"], t["weights"], (N,)))
    part.loss.backward()
    assert part.loss.item() == pytest.approx(-(values["weights"] * values["log_probs"]).sum(), rel=1e-5)
    np.testing.assert_allclose(log_probs.grad.numpy(), -values["weights"], rtol=1e-6)
