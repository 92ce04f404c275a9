"""A frozen reference: KL in loss and advantages equal float64 for any micro-batches; where it comes from, how it moves."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from miles.config.owners import CheckpointSettings
from miles.driver.run import reference_folder
from miles.errors import TrainerError
from tests.train.test_loss_hooks import each_cut, each_mean, mean64
from tests.train.test_trainer_rank import assert_gradients_close, gradient_of_step
from tests.train.tiny import (
    load64,
    make_batch,
    make_settings,
    reference_advantages,
    reference_log_probs,
    save_model,
    with_model_log_probs,
)


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """A model like the policy's with other weights."""
    return save_model(tmp_path_factory.mktemp("reference"), seed=8)


def ppo64(batch, log_probs, advantages):
    """[R] per sample; advantages are numbers or one for each response token."""
    terms = []
    for i, advantage in enumerate(advantages):
        ratio = torch.exp(log_probs[i] - torch.tensor(batch["rollout_log_probs"][i], dtype=torch.float64))
        advantage = torch.as_tensor(advantage, dtype=torch.float64)
        terms.append(torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2)))
    return terms


def frozen(folder, batch):
    return [lp.detach() for lp in reference_log_probs(load64(folder), batch)]


def trained_mean(batch, terms):
    masks = [torch.tensor(np.asarray(m, bool)) for m in batch["loss_masks"]]
    return torch.cat([t[m] for t, m in zip(terms, masks, strict=True)]).mean().item()


@each_mean
@each_cut
def test_kl_loss_pulls_towards_the_reference(launch, model, other, tmp_path, cut, per_token):
    batch = make_batch()
    settings = make_settings(
        model, use_kl_loss=True, kl_loss_coef=0.2, kl_loss_type="k3", calculate_per_token_loss=per_token, **cut
    )
    metrics, gradient = gradient_of_step(launch(settings, reference=str(other)), batch, tmp_path / "weights")
    model64, reference = load64(model), frozen(other, batch)
    log_probs = reference_log_probs(model64, batch)
    kl = [torch.exp(r - lp) - 1 - (r - lp) for r, lp in zip(reference, log_probs, strict=True)]
    policy = mean64(batch, ppo64(batch, log_probs, reference_advantages(batch)), per_token=per_token)
    kl_loss = mean64(batch, kl, per_token=per_token)
    (policy + 0.2 * kl_loss).backward()
    assert metrics["train/kl_loss"] == pytest.approx(kl_loss.item(), rel=1e-4)
    assert metrics["train/loss"] == pytest.approx((policy + 0.2 * kl_loss).item(), rel=1e-4)
    assert metrics["rollout/ref_log_probs"] == pytest.approx(trained_mean(batch, reference), rel=1e-5)
    assert_gradients_close(gradient, {name: p.grad for name, p in model64.named_parameters()})


def returns64(batch, reference, *, kl_coef, gamma, baseline):
    """Advantages of each response token by the formula, whitened over the trained ones of the whole batch."""
    columns = []
    for i, reward in enumerate(batch["raw_reward"]):
        mask = np.asarray(batch["loss_masks"][i], bool)
        kl = np.asarray(batch["rollout_log_probs"][i], np.float64) - reference[i].numpy()
        members = [
            r for r, g in zip(batch["raw_reward"], batch["group_ids"], strict=True) if g == batch["group_ids"][i]
        ]
        rewards = -kl_coef * kl[mask]
        if baseline:
            advantages = rewards + reward - np.mean(members)
        else:
            rewards[-1] += reward
            advantages = np.array(
                [sum(gamma ** (s - t) * rewards[s] for s in range(t, len(rewards))) for t in range(len(rewards))]
            )
        columns.append(np.zeros(len(mask)))
        columns[-1][mask] = advantages
    trained = np.concatenate([c[np.asarray(m, bool)] for c, m in zip(columns, batch["loss_masks"], strict=True)])
    return [(c - trained.mean()) / trained.std() for c in columns]


@each_cut
@pytest.mark.parametrize("baseline", [False, True])
def test_reinforce_plus_plus_whitens_returns_with_the_penalty(launch, model, other, tmp_path, cut, baseline):
    batch = make_batch()
    estimator = "reinforce_plus_plus_baseline" if baseline else "reinforce_plus_plus"
    settings = make_settings(
        model, advantage_estimator=estimator, normalize_advantages=True, kl_coef=0.3, gamma=0.9, **cut
    )
    metrics, gradient = gradient_of_step(launch(settings, reference=str(other)), batch, tmp_path / "weights")
    advantages = returns64(batch, frozen(other, batch), kl_coef=0.3, gamma=0.9, baseline=baseline)
    model64 = load64(model)
    loss = mean64(batch, ppo64(batch, reference_log_probs(model64, batch), advantages), per_token=False)
    loss.backward()
    assert metrics["train/loss"] == pytest.approx(loss.item(), rel=1e-3, abs=1e-6)
    assert_gradients_close(gradient, {name: p.grad for name, p in model64.named_parameters()}, rtol=1e-3)


def test_unscored_samples_are_whitened_with_nobody(launch, model):
    """The step with an unscored sample trains as the one without: its advantage is 0 and in no mean."""
    batch = with_model_log_probs(make_batch(groups=2), model)
    batch["raw_reward"][0] = None
    settings = make_settings(
        model, groups=2, advantage_estimator="reinforce_plus_plus", normalize_advantages=True,
        calculate_per_token_loss=True,
    )  # fmt: skip
    with_unscored = launch(settings).train(batch, 0)
    tokens = [int(sum(mask)) for mask in batch["loss_masks"]]
    rest = {name: column[1:] for name, column in batch.items()}
    without = launch(settings).train(rest, 0)
    share = sum(tokens[1:]) / sum(tokens)
    assert with_unscored["train/grad_norm"] == pytest.approx(without["train/grad_norm"] * share, rel=1e-4)


def test_penalty_of_tis_is_measured_from_the_trainers_own_log_probs(launch, model, other):
    """With the policy itself as reference there is no penalty, however far the engine's log-probs are."""
    given = {"advantage_estimator": "reinforce_plus_plus", "normalize_advantages": True, "use_tis": True}
    plain = launch(make_settings(model, **given)).train(make_batch(), 0)
    own = launch(make_settings(model, kl_coef=5.0, **given), reference=str(model)).train(make_batch(), 0)
    foreign = launch(make_settings(model, kl_coef=5.0, **given), reference=str(other)).train(make_batch(), 0)
    assert own["train/grad_norm"] == pytest.approx(plain["train/grad_norm"], rel=1e-3)
    assert foreign["train/grad_norm"] != pytest.approx(plain["train/grad_norm"], rel=1e-2)


# ---- where it comes from


KL = {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "k3", "lr": 1e-3, "adam_eps": 1e-8}


def test_policy_that_is_its_reference_has_no_kl_and_the_reference_stays(launch, model):
    trainer = launch(make_settings(model, **KL), reference=str(model))
    kls = [trainer.train(make_batch(), step)["train/kl_loss"] for step in range(3)]
    assert kls[0] == pytest.approx(0.0, abs=1e-9) and 0 < kls[1] < kls[2]


def test_reference_that_follows_is_saved_and_comes_back(launch, model, tmp_path):
    """Updated after steps 2 and 4: no KL in the step that follows, and a resumed run goes on from the same reference."""
    settings = make_settings(model, **KL, ref_update_interval=2)
    trainer = launch(settings, reference=str(model))
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    kls = []
    for step in range(4):
        kls.append(trainer.train(make_batch(), step)["train/kl_loss"])
        if step == 2:
            trainer.save(str(folder), optimizer=True)
    assert kls[0] == pytest.approx(0, abs=1e-9) and kls[2] == pytest.approx(0, abs=1e-9) and kls[1] > 0 and kls[3] > 0
    resumed = launch(settings, reference=str(model))
    assert resumed.load(str(folder)) == 3
    assert resumed.train(make_batch(), 3)["train/kl_loss"] == pytest.approx(kls[3], rel=1e-5)


def test_reference_can_be_a_checkpoint(launch, model, tmp_path):
    trainer = launch(make_settings(model, **KL), reference=str(model))
    trainer.train(make_batch(), 0)
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    trainer.save(str(folder), optimizer=False)
    exported = tmp_path / "export"
    trainer.export_hf(str(exported))
    found = [launch(make_settings(model, **KL), reference=str(f)).train(make_batch(), 0) for f in (folder, exported)]
    assert found[0]["train/kl_loss"] == pytest.approx(found[1]["train/kl_loss"], rel=1e-5)
    assert found[0]["train/kl_loss"] > 0


def test_reference_with_another_vocabulary_is_refused(launch, model, tmp_path):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config.from_pretrained(model)
    config.vocab_size = 50
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "small")
    with pytest.raises(TrainerError, match=r"--ref-load .*: the reference knows 50 tokens, the policy 61"):
        launch(make_settings(model, **KL), reference=str(tmp_path / "small"))


def test_reference_is_loaded_only_where_a_kl_term_counts(model, other):
    def folder_of(ref_load=None, **train):
        settings = replace(make_settings(model, **train), checkpoint=CheckpointSettings(ref_load=ref_load))
        return reference_folder(settings)

    assert folder_of(str(other), use_kl_loss=True) is None
    assert folder_of(str(other), kl_loss_coef=0.1) is None
    assert folder_of(str(other), use_kl_loss=True, kl_loss_coef=0.1) == str(other)
    assert folder_of(use_kl_loss=True, kl_loss_coef=0.1) == str(model)
    assert folder_of(kl_coef=0.1) is None
    assert folder_of(kl_coef=0.1, advantage_estimator="reinforce_plus_plus") == str(model)
