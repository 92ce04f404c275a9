"""The shipped correction against its formulas in numpy, and through a training step with its YAML file."""

from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch

from examples.train_infer_mismatch_helper.mis import correct
from miles.config import Problems, Settings, effects

YAML = Path(__file__).parents[2] / "examples" / "train_infer_mismatch_helper" / "mis.yaml"
LENGTHS = (1, 9, 4)
DEFAULTS = {
    "tis_mode": "truncate", "tis_level": "token", "tis_lower_bound": 0.8, "tis_upper_bound": 1.2, "use_rs": False,
    "rs_level": "token", "rs_lower_bound": 0.7, "rs_upper_bound": 1.4, "rs_veto_threshold": None,
}  # fmt: skip


def samples():
    rng = np.random.default_rng(5)
    rollout = [rng.normal(-2, 1, n) for n in LENGTHS]
    train = [r + rng.normal(0, 0.4, len(r)) for r in rollout]
    masks = [np.ones(1), (np.arange(9) % 4 != 1).astype(float), np.array([1.0, 0, 1, 1])]
    return train, rollout, masks


def call(**changes):
    train, rollout, masks = samples()
    tensors = [[torch.tensor(v) for v in column] for column in (train, rollout, masks)]
    loss, kept, metrics = correct(
        args=Namespace(**DEFAULTS | changes), pg_loss=torch.full((sum(LENGTHS),), 3.0, dtype=torch.float64),
        train_log_probs=tensors[0], rollout_log_probs=tensors[1], loss_masks=tensors[2],
        total_lengths=None, response_lengths=list(LENGTHS), parallel_state=None, max_seq_lens=None,
    )  # fmt: skip
    return (loss / 3).numpy(), torch.cat(kept).numpy(), metrics


def ratios(level):
    found = []
    for train, rollout, mask in zip(*samples(), strict=True):
        log_ratio = (train - rollout) * mask
        total = {"token": log_ratio, "sequence": log_ratio.sum(), "geometric": log_ratio.sum() / mask.sum()}[level]
        found.append(np.exp(total) * np.ones(len(mask)))
    return np.concatenate(found)


MODES = {
    "truncate": lambda r: np.minimum(r, 1.2),
    "clip": lambda r: np.clip(r, 0.8, 1.2),
    "mask": lambda r: np.where((r >= 0.8) & (r <= 1.2), r, 0),
}


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("mode", MODES)
def test_weights_are_bounded_ratios(mode, level):
    weights, kept, metrics = call(tis_mode=mode, tis_level=level)
    np.testing.assert_allclose(weights, MODES[mode](ratios(level)))
    np.testing.assert_allclose(metrics["mis_weight"], weights)
    assert kept.tolist() == np.concatenate(samples()[2]).tolist()


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_rejection_takes_what_is_out_of_bounds_out_of_the_masks(level):
    ratio, masks = ratios(level), np.concatenate(samples()[2])
    low, high = np.quantile(ratio, [0.3, 0.9]) + np.array([-1e-9, 1e-9])
    _, kept, metrics = call(use_rs=True, rs_level=level, rs_lower_bound=low, rs_upper_bound=high)
    assert kept.tolist() == (masks * ((ratio >= low) & (ratio <= high))).tolist()
    assert 0 < kept.sum() < masks.sum()
    assert metrics["mis_kept"].tolist() == kept.tolist()


def test_one_token_vetoes_its_sample():
    ratio = np.split(ratios("token"), np.cumsum(LENGTHS)[:-1])
    threshold = sorted(r.min() for r in ratio)[0] + 1e-9
    _, kept, _ = call(rs_veto_threshold=threshold)
    masks = samples()[2]
    expected = [m * (r.min() >= threshold) for r, m in zip(ratio, masks, strict=True)]
    assert kept.tolist() == np.concatenate(expected).tolist()
    assert 0 < kept.sum() < np.concatenate(masks).sum()


@pytest.mark.parametrize("changes", [{"tis_mode": "no"}, {"tis_level": "no"}, {"tis_batch_normalize": True}])
def test_what_it_does_not_do_is_refused_with_what_works(changes):
    with pytest.raises(ValueError, match="work"):
        call(**changes)


def test_its_file_is_read_as_settings_and_as_what_hooks_find():
    problems = Problems()
    settings = Settings.parse(["--custom-config-path", str(YAML)], problems)
    effects.check(settings, problems)
    assert problems.lines == []
    assert settings.train.use_tis and settings.train.custom_tis_function_path.endswith("mis.correct")
    args = settings.namespace()
    assert (args.tis_mode, args.rs_level, args.rs_veto_threshold) == ("truncate", "geometric", 0.0001)
    correct(args=args, pg_loss=torch.ones(1), **{n: [torch.ones(1)] for n in (
        "train_log_probs", "rollout_log_probs", "loss_masks",
    )})  # fmt: skip
