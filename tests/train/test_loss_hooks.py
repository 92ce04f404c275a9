"""Users' hooks of the loss: the contract's shapes, the same value for any micro-batches, and errors that name the hook."""

import re
from contextlib import ExitStack

import numpy as np
import pytest
import torch

from miles.errors import HookError, TrainerError
from miles.hooks import function_registry
from tests.train.test_trainer_rank import assert_gradients_close, gradient_of_step
from tests.train.tiny import load64, make_batch, make_settings, reference_advantages, reference_log_probs, weights_of

CUTS = [{"max_tokens_per_gpu": 4096}, {"max_tokens_per_gpu": 24}, {"max_tokens_per_gpu": None, "micro_batch_size": 1}]
each_cut = pytest.mark.parametrize("cut", CUTS, ids=["one", "some", "single"])
each_mean = pytest.mark.parametrize("per_token", [False, True], ids=["sample", "token"])


@pytest.fixture
def hooks():
    with ExitStack() as stack:
        yield lambda **named: [
            stack.enter_context(function_registry.temporary(f"user.{name}", hook)) for name, hook in named.items()
        ]


def mean64(batch, terms, *, per_token):
    """The mean over samples of masked means, or over tokens, of one [R] tensor for each sample."""
    masks = [torch.tensor(np.asarray(m, bool)) for m in batch["loss_masks"]]
    sums = [t[m].sum() for t, m in zip(terms, masks, strict=True)]
    if per_token:
        return sum(sums) / sum(int(m.sum()) for m in masks)
    return sum(s / int(m.sum()) for s, m in zip(sums, masks, strict=True)) / len(sums)


def exact(model, batch, loss_of):
    model64 = load64(model)
    loss = loss_of(reference_log_probs(model64, batch))
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model64.named_parameters()}


# ---- a loss of the user's


def likelihood(args, batch, logits, sum_of_sample_mean):
    targets = torch.cat([t[-n:] for t, n in zip(batch["tokens"], batch["response_lengths"], strict=True)])
    log_probs = torch.log_softmax(logits.float(), -1).gather(1, targets[:, None])[:, 0]
    loss = -sum_of_sample_mean(log_probs * torch.cat(batch["advantages"]))
    return loss, {"log_likelihood": sum_of_sample_mean(log_probs).item()}


@each_mean
@each_cut
def test_own_loss_has_the_value_and_gradient_of_one_batch(launch, model, tmp_path, hooks, cut, per_token):
    hooks(loss=likelihood)
    batch = make_batch()
    settings = make_settings(
        model, loss_type="custom_loss", custom_loss_function_path="user.loss", calculate_per_token_loss=per_token, **cut
    )
    metrics, gradient = gradient_of_step(launch(settings), batch, tmp_path / "weights")

    def loss_of(log_probs):
        terms = [-lp * a for lp, a in zip(log_probs, reference_advantages(batch), strict=True)]
        return mean64(batch, terms, per_token=per_token)

    loss, expected = exact(model, batch, loss_of)
    assert metrics["train/loss"] == pytest.approx(loss, rel=1e-4)
    assert_gradients_close(gradient, expected)
    mean, _ = exact(model, batch, lambda log_probs: mean64(batch, log_probs, per_token=per_token))
    assert metrics["train/log_likelihood"] == pytest.approx(mean, rel=1e-4)


def test_sum_of_sample_mean_is_what_its_name_says(launch, model, hooks):
    """L2a: one sample of 2 tokens with a loss of 1 each, one of 8 tokens with 0: 0.5 over samples, 0.2 over tokens."""
    batch = make_batch(groups=2, samples=1)
    for i, length in enumerate((2, 8)):
        batch["tokens"][i] = np.arange(1, 3 + length, dtype=np.int32)
        batch["response_lengths"][i] = length
        batch["loss_masks"][i] = np.ones(length, np.uint8)
        batch["rollout_log_probs"][i] = np.zeros(length, np.float32)

    def loss(args, batch, logits, sum_of_sample_mean):
        ones = [torch.full((n,), 1.0 if n == 2 else 0.0) for n in batch["response_lengths"]]
        return sum_of_sample_mean(ones) + 0.0 * logits.sum(), {}

    hooks(loss=loss)
    for per_token, expected in ((False, 0.5), (True, 0.2)):
        for cut in CUTS:
            settings = make_settings(
                model, groups=2, samples=1, loss_type="custom_loss", custom_loss_function_path="user.loss",
                calculate_per_token_loss=per_token, **cut,
            )  # fmt: skip
            assert launch(settings).train(batch, 0)["train/loss"] == pytest.approx(expected)


def test_own_loss_gets_the_columns_of_its_samples(launch, model, hooks):
    seen = []

    def loss(args, batch, logits, sum_of_sample_mean):
        seen.append((args, batch))
        return sum_of_sample_mean(logits[:, 0]), {}

    hooks(loss=loss)
    given = make_batch() | {"metadata": [{"row": i} for i in range(12)]}
    launch(make_settings(model, loss_type="custom_loss", custom_loss_function_path="user.loss")).train(given, 0)
    assert sorted(index for _, batch in seen for index in batch["sample_indices"]) == given["sample_indices"]
    for args, batch in seen:
        assert args.hf_checkpoint == str(model)
        for k, index in enumerate(batch["sample_indices"]):
            i = index - 100
            assert batch["metadata"][k] == {"row": i}
            assert batch["tokens"][k].tolist() == given["tokens"][i].tolist()
            assert batch["total_lengths"][k] == len(given["tokens"][i])
            mask = given["loss_masks"][i]
            assert batch["loss_masks"][k].tolist() == mask.tolist()
            np.testing.assert_allclose(batch["rollout_log_probs"][k], np.where(mask, given["rollout_log_probs"][i], 0))


# ---- off-policy correction and reducer


def gate(*, pg_loss, train_log_probs, rollout_log_probs, loss_masks, **_):
    """Doubles the loss and drops tokens whose log-probs differ by more than 0.5."""
    far = [(a - b).abs() > 0.5 for a, b in zip(train_log_probs, rollout_log_probs, strict=True)]
    masks = [m * ~f for m, f in zip(loss_masks, far, strict=True)]
    return 2 * pg_loss, masks, {"far": far_tokens(far), "one": torch.ones_like(pg_loss)}


def far_tokens(far):
    return torch.cat(far).float()


def gated64(batch, log_probs):
    """PPO with the trainer's log-probs as denominators, doubled, without the tokens that are too far away."""
    terms = []
    for i, advantage in enumerate(reference_advantages(batch)):
        own = log_probs[i]
        far = (own.detach() - torch.tensor(batch["rollout_log_probs"][i], dtype=torch.float64)).abs() > 0.5
        terms.append(torch.where(far, 0.0, -2 * advantage * torch.exp(own - own.detach())))
    return terms


@each_mean
@each_cut
def test_correction_is_that_of_one_batch_over_the_tokens_there_were(launch, model, tmp_path, hooks, cut, per_token):
    hooks(tis=lambda **given: gate(**given))
    batch = make_batch()
    settings = make_settings(
        model, use_tis=True, custom_tis_function_path="user.tis", calculate_per_token_loss=per_token, **cut
    )
    metrics, gradient = gradient_of_step(launch(settings), batch, tmp_path / "weights")
    loss, expected = exact(model, batch, lambda lps: mean64(batch, gated64(batch, lps), per_token=per_token))
    assert metrics["train/pg_loss"] == pytest.approx(loss, rel=1e-4)
    assert_gradients_close(gradient, expected)
    assert 0 < metrics["train/far"] < 1 and metrics["train/one"] == 1.0
    assert "train/tis" not in metrics


def test_mismatch_metrics_alone_change_nothing(launch, model, hooks):
    hooks(tis=lambda **given: gate(**given))
    plain = launch(make_settings(model)).train(make_batch(), 0)
    settings = make_settings(model, get_mismatch_metrics=True, custom_tis_function_path="user.tis")
    measured = launch(settings).train(make_batch(), 0)
    assert measured["train/loss"] == plain["train/loss"] and measured["train/grad_norm"] == plain["train/grad_norm"]
    assert measured.keys() - plain.keys() == {"train/far", "train/one"}


@each_cut
def test_reducer_makes_the_sum_over_samples(launch, model, tmp_path, hooks, cut):
    """Dr. GRPO's: the sum over tokens over a constant, whatever the length of a sample; after a correction's masks."""

    def reducer(total_lengths, response_lengths, loss_masks, per_token):
        assert not per_token and all(t > n for t, n in zip(total_lengths, response_lengths, strict=True))
        return lambda pg: (pg * torch.cat(loss_masks)).sum() / 16

    hooks(tis=lambda **given: gate(**given), reducer=reducer)
    batch = make_batch()
    settings = make_settings(
        model, use_tis=True, custom_tis_function_path="user.tis",
        custom_pg_loss_reducer_function_path="user.reducer", **cut,
    )  # fmt: skip
    metrics, gradient = gradient_of_step(launch(settings), batch, tmp_path / "weights")

    def loss_of(log_probs):
        masks = [torch.tensor(np.asarray(m, bool)) for m in batch["loss_masks"]]
        return sum(t[m].sum() for t, m in zip(gated64(batch, log_probs), masks, strict=True)) / 16 / len(masks)

    loss, expected = exact(model, batch, loss_of)
    assert metrics["train/pg_loss"] == pytest.approx(loss, rel=1e-4)
    assert_gradients_close(gradient, expected)


# ---- what goes wrong


def own_loss(model):
    return make_settings(model, loss_type="custom_loss", custom_loss_function_path="user.loss")


def raising(args, batch, logits, sum_of_sample_mean):
    raise KeyError("nothing here")


BAD_LOSSES = {
    r"user\.loss failed on samples 1\d\d, .*KeyError: 'nothing here' \(.*test_loss_hooks\.py:\d+\)": raising,
    r"returned a Tensor; \(loss, metrics\) works": lambda a, b, logits, s: logits.sum(),
    r"its loss is a float; a scalar tensor works": lambda a, b, logits, s: (1.0, {}),
    r"its loss is nan": lambda a, b, logits, s: (logits.sum() * float("nan"), {}),
    r"what sum_of_sample_mean got is 3 numbers; a tensor of \d+ works": lambda a, b, logits, s: (s(torch.ones(3)), {}),
    r"metric m is 'x'; a number works": lambda a, b, logits, s: (logits.sum(), {"m": "x"}),
}


@pytest.mark.parametrize("said", BAD_LOSSES)
def test_own_loss_that_fails_is_named_and_changes_no_weight(launch, model, tmp_path, hooks, said):
    hooks(loss=BAD_LOSSES[said])
    trainer = launch(own_loss(model))
    before = weights_of(trainer, tmp_path / "weights")
    with pytest.raises(HookError, match=rf"(?s)training step 0, optimizer step 0: .*{said}"):
        trainer.train(make_batch(), 0)
    after = weights_of(trainer, tmp_path / "weights")
    assert all(torch.equal(after[name], weights) for name, weights in before.items())


BAD_CORRECTIONS = {
    "returned a Tensor; (pg_loss, masks, metrics) works": lambda **given: given["pg_loss"],
    "pg_loss is a NoneType": lambda **given: (None, given["loss_masks"], {}),
    "masks is 1 numbers": lambda **given: (given["pg_loss"], torch.ones(1), {}),
    "isn't finite at a token that it keeps": lambda **given: (given["pg_loss"] / 0, given["loss_masks"], {}),
}


@pytest.mark.parametrize("said", BAD_CORRECTIONS)
def test_correction_that_fails_is_named(launch, model, hooks, said):
    hooks(tis=BAD_CORRECTIONS[said])
    with pytest.raises(HookError, match=rf"(?s)optimizer step 0: user\.tis.*{re.escape(said)}"):
        launch(make_settings(model, use_tis=True, custom_tis_function_path="user.tis")).train(make_batch(), 0)


def test_own_loss_needs_a_prompt_to_predict_from(launch, model, hooks):
    hooks(loss=likelihood)
    batch = make_batch()
    batch["response_lengths"][3] = len(batch["tokens"][3])
    batch["loss_masks"][3] = np.r_[0, np.ones(len(batch["tokens"][3]) - 1, int)]
    batch["rollout_log_probs"][3] = np.zeros(len(batch["tokens"][3]))
    with pytest.raises(TrainerError, match="sample 103 has no prompt"):
        launch(own_loss(model)).train(batch, 0)


# ---- the likelihood


@each_mean
@each_cut
def test_sft_is_the_likelihood_of_what_has_no_log_probs_and_no_reward(launch, model, tmp_path, cut, per_token):
    batch = make_batch() | {"rollout_log_probs": [None] * 12, "raw_reward": [None] * 12}
    settings = make_settings(
        model, loss_type="sft_loss", compute_advantages_and_returns=False, calculate_per_token_loss=per_token, **cut
    )
    metrics, gradient = gradient_of_step(launch(settings), batch, tmp_path / "weights")
    loss, expected = exact(model, batch, lambda lps: -mean64(batch, lps, per_token=per_token))
    assert metrics["train/loss"] == pytest.approx(loss, rel=1e-4)
    assert_gradients_close(gradient, expected)
    assert {n for n in metrics if n.startswith("train/")} == {
        "train/loss", "train/entropy_loss", "train/grad_norm", "train/lr-pg_0",
    }  # fmt: skip
