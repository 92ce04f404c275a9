"""Two ranks are one trainer: the same loss, gradient, weights, segment bytes and checkpoints as a single rank."""

import json
import os
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.multiprocessing

from miles.engine.segment import Manifest, Segment
from miles.errors import HookError, TrainerError
from miles.hooks import function_registry
from tests.train.test_loss_hooks import gate, likelihood
from tests.train.tiny import make_batch, make_settings, reference_gradient, running, save_model, weights_of

pytestmark = pytest.mark.slow

MICRO = {"max_tokens_per_gpu": 30}
ADAM = {"lr": 1e-3, "adam_eps": 1e-8, "clip_grad": 1.0, "use_tis": True, "num_steps_per_rollout": 3}

PENALTY = {"advantage_estimator": "reinforce_plus_plus", "normalize_advantages": True, "kl_coef": 0.3, "gamma": 0.9}
FAMILY = {
    "gspo-kl": {"advantage_estimator": "gspo", "use_kl_loss": True, "kl_loss_coef": 0.2, "use_unbiased_kl": True},
    "reinforce": PENALTY | {"use_tis": True, "num_steps_per_rollout": 2},
    "opsm": {"use_opsm": True, "normalize_advantages": True},
    "own-loss": {"loss_type": "custom_loss", "custom_loss_function_path": "user.loss"},
    "hooks": {
        "use_tis": True, "custom_tis_function_path": "user.tis", "custom_pg_loss_reducer_function_path": "user.reducer",
    },
    "sft": {"loss_type": "sft_loss", "calculate_per_token_loss": True},
}  # fmt: skip


def reducer(total_lengths, response_lengths, loss_masks, per_token):
    return lambda pg: (pg * torch.cat(loss_masks)).sum() / 16


def bad_loss(args, batch, logits, sum_of_sample_mean):
    """Fails where sample 104 is, which is on one rank."""
    assert 104 not in batch["sample_indices"], "not this one"
    return likelihood(args, batch, logits, sum_of_sample_mean)


HOOKS = {"user.loss": likelihood, "user.tis": gate, "user.reducer": reducer, "user.bad": bad_loss}


def uneven_batch():
    """Eleven samples, one of which trains nothing: ten that two ranks share, in groups of 4, 4 and 3."""
    batch = {name: column[:-1] for name, column in make_batch().items()}
    batch["loss_masks"][2][:] = 0
    return batch


def one_bad_token(batch):
    """Token 60 stands in one prompt only, so that one rank alone meets it."""
    batch["tokens"] = [np.minimum(tokens, 59) for tokens in batch["tokens"]]
    batch["tokens"][4][0] = 60
    return batch


def run_ranks(folder, ranks, rank=0):
    """Everything that is compared, once; what each rank saw lies in ``folder/ranks-W``."""
    own = folder / f"ranks-{ranks}"
    own.mkdir(exist_ok=True)
    seen = {}

    def start(store, **train):
        settings = make_settings(folder / "model", ranks=ranks, **MICRO, **train)
        reference = str(folder / "reference") if settings.uses_reference else None
        return running(settings, own, rank=rank, store=store, reference=reference)

    for name, train in {"sample": {}, "token": {"calculate_per_token_loss": True}, **FAMILY}.items():
        with start(f"descent-{name}", **train) as trainer:
            before = weights_of(trainer, own / name)
            seen[name] = trainer.train(uneven_batch(), 0)
            after = weights_of(trainer, own / name)
            torch.save({n: before[n].double() - after[n].double() for n in before}, own / f"gradient-{name}-{rank}.pt")

    with start("adam", **ADAM) as trainer:
        seen["adam"] = trainer.train(make_batch(), 0)
        (own / "checkpoint").mkdir(exist_ok=True)
        trainer.save(str(own / "checkpoint"), optimizer=True)
        trainer.train(make_batch(seed=1), 1)
        weights_of(trainer, own / "segments")
        trainer.export_hf(str(own / "export"))
        trainer.write_weights(5, str(own / "versions"), frozenset(), "disk")
    (own / f"metrics-{rank}.json").write_text(json.dumps(seen))


def fail_on_one_rank(folder, rank):
    with running(make_settings(folder / "untied", ranks=2, **MICRO), folder, rank=rank, store="failing") as trainer:
        if rank == 1:
            trainer._policy.tensors()["model.embed_tokens.weight"].to_local()[-1] = float("nan")
        with pytest.raises(TrainerError) as caught:
            trainer.train(one_bad_token(make_batch()), 0)
    (folder / f"failure-{rank}.txt").write_text(str(caught.value))


def fail_in_a_hook(folder, rank):
    settings = make_settings(
        folder / "model", ranks=2, **MICRO, loss_type="custom_loss", custom_loss_function_path="user.bad"
    )
    with running(settings, folder, rank=rank, store="hook") as trainer, pytest.raises(HookError) as caught:
        trainer.train(make_batch(), 0)
    (folder / f"hook-{rank}.txt").write_text(str(caught.value))


def with_hooks(act, *given):
    with ExitStack() as stack:
        for name, hook in HOOKS.items():
            stack.enter_context(function_registry.temporary(name, hook))
        act(*given)


def both(rank, folder):
    with_hooks(run_ranks, Path(folder), 2, rank)
    fail_on_one_rank(Path(folder), rank)
    with_hooks(fail_in_a_hook, Path(folder), rank)
    # Without tearing the interpreter down: what torch's threads do there says nothing about what is tested here.
    os._exit(0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    save_model(folder / "model")
    save_model(folder / "untied", tied=False)
    save_model(folder / "reference", seed=8)
    torch.multiprocessing.spawn(both, (str(folder),), nprocs=2)
    with_hooks(run_ranks, folder, 1)
    return folder


def metrics(folder, ranks, rank=0):
    return json.loads((folder / f"ranks-{ranks}" / f"metrics-{rank}.json").read_text())


def timeless(values):
    return {name: value for name, value in values.items() if "time" not in name}


def test_every_rank_returns_the_same_metrics(folder):
    first, second = metrics(folder, 2, 0), metrics(folder, 2, 1)
    assert {n: timeless(v) for n, v in first.items()} == {n: timeless(v) for n, v in second.items()}


@pytest.mark.parametrize("mode", ["sample", "token", "adam", *FAMILY])
def test_metrics_are_those_of_one_rank(folder, mode):
    one, two = metrics(folder, 1)[mode], metrics(folder, 2)[mode]
    for name, value in timeless(one).items():
        assert two[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize("mode", ["sample", "token"])
def test_gradient_is_that_of_one_rank_and_of_the_reference(folder, mode):
    one = torch.load(folder / "ranks-1" / f"gradient-{mode}-0.pt")
    two = torch.load(folder / "ranks-2" / f"gradient-{mode}-0.pt")
    loss, exact = reference_gradient(folder / "model", uneven_batch(), per_token=mode == "token")
    assert metrics(folder, 2)[mode]["train/loss"] == pytest.approx(loss, rel=1e-4)
    for name, gradient in two.items():
        scale = exact[name].abs().max().item()
        torch.testing.assert_close(gradient, one[name], rtol=1e-5, atol=1e-6 * max(scale, 0.1), msg=name)
        torch.testing.assert_close(gradient, exact[name], rtol=1e-4, atol=1e-5 * max(scale, 0.1), msg=name)


@pytest.mark.parametrize("mode", FAMILY)
def test_gradient_of_every_loss_is_that_of_one_rank(folder, mode):
    one, two = (torch.load(folder / f"ranks-{ranks}" / f"gradient-{mode}-0.pt") for ranks in (1, 2))
    assert max(gradient.abs().max().item() for gradient in one.values()) > 1e-3
    for name, gradient in two.items():
        scale = one[name].abs().max().item()
        torch.testing.assert_close(gradient, one[name], rtol=1e-4, atol=1e-5 * max(scale, 0.1), msg=name)


def test_hook_that_fails_on_one_rank_is_named_on_both(folder):
    first, second = ((folder / f"hook-{rank}.txt").read_text() for rank in (0, 1))
    assert first == second and "user.bad failed on samples" in first and "not this one" in first


def test_segment_is_laid_out_and_filled_as_by_one_rank(folder):
    one, two = folder / "ranks-1" / "segments", folder / "ranks-2" / "segments"
    assert (one / "manifest.json").read_bytes() == (two / "manifest.json").read_bytes()
    assert_same_weights(one, two)


def assert_same_weights(one, two):
    """Up to the order of sums; the checksums behind the tensors tell bits, so they are not compared."""
    a, b = (Segment(path / "segment-0.bin", Manifest.load(path)).tensors for path in (one, two))
    for name, tensor in a.items():
        torch.testing.assert_close(tensor, b[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["export", "versions/version_000005"])
def test_folders_hold_what_the_segment_holds(folder, kind):
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(folder / "ranks-2" / kind).state_dict()
    with running(make_settings(folder / "ranks-2" / kind), folder, store=f"reload-{Path(kind).name}") as trainer:
        published = weights_of(trainer, folder / "reloaded")
    assert all(torch.equal(loaded[name], weights) for name, weights in published.items())
    segment = folder / "ranks-2" / "segments" / "segment-0.bin"
    assert segment.read_bytes() == (folder / "reloaded" / "segment-0.bin").read_bytes()


def test_checkpoint_of_two_ranks_goes_on_with_one(folder):
    with running(make_settings(folder / "model", **ADAM, **MICRO), folder, store="resumed") as trainer:
        assert trainer.load(str(folder / "ranks-2" / "checkpoint")) == 1
        trainer.train(make_batch(seed=1), 1)
        weights_of(trainer, folder / "goes-on")
    assert_same_weights(folder / "goes-on", folder / "ranks-2" / "segments")


def test_failure_on_one_rank_is_raised_on_both_with_the_sample(folder):
    first, second = ((folder / f"failure-{rank}.txt").read_text() for rank in (0, 1))
    assert (
        first
        == second
        == "training step 0, optimizer step 0: a log-prob of sample 104 isn't finite under the trainer's weights"
    )
