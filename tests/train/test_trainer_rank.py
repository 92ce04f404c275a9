"""One rank with a real model: exact against float64, whatever the micro-batches; nothing silent; what is saved comes back."""

import json

import numpy as np
import pytest
import torch

from miles.config.owners import TrainSettings
from miles.errors import TrainerError
from miles.train.batch import collate, read_batch
from tests.train.tiny import (
    VOCABULARY,
    changed,
    make_batch,
    make_settings,
    reference_gradient,
    save_model,
    weights_of,
    with_model_log_probs,
)


def gradient_of_step(trainer, batch, folder):
    """Loss and gradients as the weights show them: `make_settings` trains by gradient descent with rate 1."""
    before = weights_of(trainer, folder)
    metrics = trainer.train(batch, 0)
    after = weights_of(trainer, folder)
    return metrics, {name: before[name].double() - after[name].double() for name in before}


def assert_gradients_close(found, expected, rtol=1e-4):
    for name, gradient in found.items():
        scale = expected[name].abs().max().item()
        torch.testing.assert_close(gradient, expected[name].double(), rtol=rtol, atol=1e-5 * max(scale, 1e-2), msg=name)


# ---- exactness


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize(
    "micro", [{"max_tokens_per_gpu": 4096}, {"max_tokens_per_gpu": 24}, {"max_tokens_per_gpu": None}]
)
def test_loss_and_gradient_equal_the_float64_reference_for_any_micro_batches(launch, model, tmp_path, per_token, micro):
    batch = make_batch()
    trainer = launch(make_settings(model, calculate_per_token_loss=per_token, **micro))
    metrics, gradient = gradient_of_step(trainer, batch, tmp_path / "weights")
    loss, expected = reference_gradient(model, batch, per_token=per_token)
    assert metrics["train/loss"] == pytest.approx(loss, rel=1e-4)
    assert_gradients_close(gradient, expected)
    norm = sum((g**2).sum().item() for g in expected.values()) ** 0.5
    assert metrics["train/grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_what_the_loss_mask_hides_reaches_neither_loss_nor_gradient(launch, model, tmp_path):
    """NaN and huge log-probs at masked tokens, and other tokens after the last trained one, change nothing at all."""
    clean, spoilt = make_batch(), make_batch()
    for i, mask in enumerate(clean["loss_masks"]):
        mask[1:3] = 0
        spoilt["loss_masks"][i] = np.concatenate([mask, [0, 0]]).astype(np.uint8)
        spoilt["tokens"][i] = np.concatenate([spoilt["tokens"][i], [3, 4]]).astype(np.int32)
        spoilt["response_lengths"][i] += 2
        log_probs = np.where(mask == 1, clean["rollout_log_probs"][i], [np.nan, -1000.0][i % 2])
        spoilt["rollout_log_probs"][i] = np.concatenate([log_probs, [np.inf, -np.inf]]).astype(np.float32)
    found = []
    for batch in (clean, spoilt):
        trainer = launch(make_settings(model, max_tokens_per_gpu=40))
        found.append(gradient_of_step(trainer, batch, tmp_path / "weights"))
    assert found[0][0]["train/loss"] == found[1][0]["train/loss"]
    assert all(torch.equal(found[0][1][name], found[1][1][name]) for name in found[0][1])


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_equal_weights_mean_no_difference_to_the_engine(launch, model, temperature):
    batch = with_model_log_probs(make_batch(), model, temperature)
    metrics = launch(make_settings(model, temperature=temperature)).train(batch, 0)
    assert metrics["train/train_rollout_logprob_abs_diff"] < 1e-5
    assert metrics["train/train_rollout_kl"] < 1e-9
    assert metrics["train/ess_ratio"] == pytest.approx(1.0, abs=1e-6)


def test_a_shift_by_one_position_would_be_seen(launch, model):
    batch = with_model_log_probs(make_batch(), model)
    batch["rollout_log_probs"] = [np.roll(lp, 1) for lp in batch["rollout_log_probs"]]
    assert launch(make_settings(model)).train(batch, 0)["train/train_rollout_logprob_abs_diff"] > 0.1


@torch.no_grad()
def test_packed_and_padded_rows_give_the_same_log_probs(launch, model):
    trainer = launch(make_settings(model))
    [samples] = read_batch(make_batch(), TrainSettings(), optimizer_steps=1, vocabulary=VOCABULARY)
    padded, packed = (
        trainer._policy.log_probs(collate(samples, packed=packed, device=torch.device("cpu")))
        for packed in (False, True)
    )
    torch.testing.assert_close(padded, packed, rtol=1e-5, atol=1e-5)


def test_groups_with_fewer_samples_are_trained_exactly(launch, model, tmp_path):
    batch = make_batch()
    ragged = {name: column[:2] + column[5:] for name, column in batch.items()}
    metrics, gradient = gradient_of_step(launch(make_settings(model)), ragged, tmp_path / "weights")
    loss, expected = reference_gradient(model, ragged)
    assert metrics["train/loss"] == pytest.approx(loss, rel=1e-4)
    assert_gradients_close(gradient, expected)


# ---- optimizer steps


def test_batch_is_as_many_optimizer_steps_as_set(launch, model, tmp_path):
    """Two steps of one group each are the same as two batches of one group, with the schedule going on."""
    batch = make_batch(groups=2)
    halves = [{name: column[i : i + 4] for name, column in batch.items()} for i in (0, 4)]
    plan = {"lr": 1e-3, "adam_eps": 1e-8, "clip_grad": 1.0, "lr_decay_style": "linear", "lr_warmup_iters": 2}
    trainer = launch(make_settings(model, groups=2, num_steps_per_rollout=2, **plan), total_steps=4)
    together_metrics = trainer.train(batch, 1)
    together = weights_of(trainer, tmp_path / "weights")
    trainer = launch(make_settings(model, groups=1, **plan), total_steps=8)
    apart_metrics = [trainer.train(half, 2 + i) for i, half in enumerate(halves)]
    for name, weights in weights_of(trainer, tmp_path / "weights").items():
        torch.testing.assert_close(weights, together[name])
    assert together_metrics["train/lr-pg_0"] == apart_metrics[1]["train/lr-pg_0"] == pytest.approx(1e-3 * 5 / 6)
    assert together_metrics["train/loss"] == pytest.approx(sum(m["train/loss"] for m in apart_metrics) / 2)


def test_tis_takes_its_denominator_before_the_first_optimizer_step(launch, model):
    """The same group twice: in the second step the policy has moved on, but its denominator is from before the first."""
    group = with_model_log_probs(make_batch(groups=1), model)
    twice = {name: column + column for name, column in group.items()}
    twice["group_ids"] = [0] * 4 + [1] * 4
    settings = make_settings(model, groups=2, num_steps_per_rollout=2, use_tis=True, lr=1e-2, adam_eps=1e-8)
    metrics = launch(settings).train(twice, 0)
    assert abs(metrics["train/ppo_kl"]) > 1e-3
    assert metrics["train/train_rollout_logprob_abs_diff"] < 1e-5
    assert metrics["train/tis"] == pytest.approx(1.0, abs=1e-5)


def test_gradient_is_clipped_to_its_norm(launch, model, tmp_path):
    trainer = launch(make_settings(model, clip_grad=0.01))
    metrics, gradient = gradient_of_step(trainer, make_batch(), tmp_path / "weights")
    assert metrics["train/grad_norm"] > 0.01
    assert sum((g**2).sum().item() for g in gradient.values()) ** 0.5 == pytest.approx(0.01, rel=1e-3)


def test_weight_decay_is_for_matrices_only(launch, model, tmp_path):
    trainer = launch(make_settings(model, lr=0.1, weight_decay=0.5))
    batch = make_batch() | {"raw_reward": [1.0] * 12}
    before = weights_of(trainer, tmp_path / "weights")
    trainer.train(batch, 0)
    for name, weights in weights_of(trainer, tmp_path / "weights").items():
        torch.testing.assert_close(weights, before[name] * (0.95 if weights.dim() >= 2 else 1.0))


def test_frozen_embeddings_and_their_tied_head_stay_as_they_are(launch, model, tmp_path):
    trainer = launch(make_settings(model, freeze_embeddings=True))
    _, gradient = gradient_of_step(trainer, make_batch(), tmp_path / "weights")
    assert gradient["model.embed_tokens.weight"].abs().max() == 0
    _, expected = reference_gradient(model, make_batch())
    assert_gradients_close({n: g for n, g in gradient.items() if "embed" not in n}, expected)


def test_entropy_bonus_raises_entropy(launch, model):
    settings = make_settings(model, entropy_coef=1.0, lr=1e-2, adam_eps=1e-8)
    batch = with_model_log_probs(make_batch(), model) | {"raw_reward": [1.0] * 12}
    trainer = launch(settings)
    entropies = [trainer.train(batch, step)["train/entropy_loss"] for step in range(3)]
    assert entropies == sorted(entropies) and entropies[0] < entropies[2]


def test_bfloat16_learns_with_float32_weights(launch, tmp_path):
    model = save_model(tmp_path / "model", dtype=torch.bfloat16)
    batch = with_model_log_probs(make_batch(), model)
    trainer = launch(make_settings(model, dtype="bfloat16", max_tokens_per_gpu=40))
    metrics, gradient = gradient_of_step(trainer, batch, tmp_path / "weights")
    _, expected = reference_gradient(model, batch)
    assert metrics["train/train_rollout_logprob_abs_diff"] < 0.2
    norm = sum((g**2).sum().item() for g in expected.values()) ** 0.5
    assert metrics["train/grad_norm"] == pytest.approx(norm, rel=0.1)
    found, exact = (torch.cat([g[n].double().flatten() for n in expected]) for g in (gradient, expected))
    assert torch.cosine_similarity(found, exact, dim=0) > 0.97
    assert all(t.dtype == torch.float32 for t in trainer._policy.tensors().values())


# ---- nothing silent


def poison(trainer, value):
    trainer._policy.tensors()["model.norm.weight"].to_local().fill_(value)


def test_log_prob_that_is_not_finite_names_a_sample_and_changes_no_weight(launch, model, tmp_path):
    trainer = launch(make_settings(model))
    poison(trainer, float("nan"))
    before = weights_of(trainer, tmp_path / "weights")
    with pytest.raises(
        TrainerError, match=r"training step 3, optimizer step 0: a log-prob of sample 1\d\d isn't finite"
    ):
        trainer.train(make_batch(), 3)
    after = weights_of(trainer, tmp_path / "weights")
    assert all(torch.equal(after[n], before[n]) for n in before if n != "model.norm.weight")


def test_gradient_that_is_not_finite_stops_before_the_weights_change(launch, model, tmp_path, monkeypatch):
    trainer = launch(make_settings(model))
    before = weights_of(trainer, tmp_path / "weights")
    monkeypatch.setattr("miles.train.rank.clip_gradients", lambda *_: float("inf"))
    with pytest.raises(TrainerError, match="training step 0, optimizer step 0: the gradient norm is inf"):
        trainer.train(make_batch(), 0)
    assert all(torch.equal(t, before[n]) for n, t in weights_of(trainer, tmp_path / "weights").items())


def test_gradients_of_a_refused_step_do_not_reach_the_next(launch, model, tmp_path, monkeypatch):
    _, expected = gradient_of_step(launch(make_settings(model)), make_batch(seed=1), tmp_path / "weights")
    trainer = launch(make_settings(model))
    with monkeypatch.context() as patch, pytest.raises(TrainerError):
        patch.setattr("miles.train.rank.clip_gradients", lambda *_: float("nan"))
        trainer.train(make_batch(seed=0), 0)
    _, found = gradient_of_step(trainer, make_batch(seed=1), tmp_path / "weights")
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_step_with_every_mask_zero_is_an_error(launch, model):
    batch = make_batch()
    batch["loss_masks"] = [np.zeros_like(mask) for mask in batch["loss_masks"]]
    with pytest.raises(TrainerError, match="the loss masks of all 12 samples"):
        launch(make_settings(model)).train(batch, 0)


def test_model_that_is_no_causal_lm_is_refused_at_start(launch, model, tmp_path):
    folder = tmp_path / "encoder"
    folder.mkdir()
    config = {"model_type": "vit", "architectures": ["ViTModel"]}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(TrainerError, match="--hf-checkpoint"):
        launch(make_settings(folder))


def test_closing_twice_is_fine(launch, model):
    trainer = launch(make_settings(model))
    trainer.close()
    trainer.close()


def test_step_reports_the_metrics_of_the_contract(launch, model):
    metrics = launch(changed(make_settings(model), use_tis=True)).train(make_batch(), 0)
    assert metrics.keys() == {
        *(f"train/{n}" for n in (
            "loss", "pg_loss", "pg_clipfrac", "ppo_kl", "entropy_loss", "train_rollout_logprob_abs_diff", "train_rollout_kl",
            "ess_ratio", "ois", "tis", "tis_clipfrac", "tis_abs", "grad_norm", "lr-pg_0",
        )),
        "perf/actor_train_time", "perf/train_tokens",
    }  # fmt: skip
    assert metrics["perf/train_tokens"] == sum(len(t) for t in make_batch()["tokens"])
    assert all(np.isfinite(v) for v in metrics.values())
