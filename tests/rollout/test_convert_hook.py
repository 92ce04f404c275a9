"""A converter of the user's: its columns come out complete, in their groups, or one error says what doesn't fit."""

import asyncio
import re
from argparse import Namespace

import numpy as np
import pytest

from miles.config.owners import TrainSettings
from miles.errors import HookError
from miles.hooks import function_registry
from miles.rollout.convert_hook import convert
from miles.train.batch import read_batch
from miles.types import FinishedGroup, Sample


def groups():
    """Groups 7 and 9, two samples each; the second of group 9 are two pieces of one rollout."""

    def sample(index, rollout_id=None):
        return Sample(
            index=index, rollout_id=rollout_id, tokens=[1, 2, 3, 4], response_length=2, loss_mask=[1, 1],
            rollout_log_probs=[-0.5, -1.0], reward=float(index),
        )  # fmt: skip

    pieces = [sample(3, 33), sample(4, 33)]
    return [FinishedGroup(7, [sample(0), sample(1)], 1, 1), FinishedGroup(9, [sample(2), pieces], 1, 1)]


def columns(samples, **more):
    return {
        "tokens": [s.tokens for s in samples],
        "response_lengths": [s.response_length for s in samples],
        "loss_masks": [s.loss_mask for s in samples],
        "rollout_log_probs": [s.rollout_log_probs for s in samples],
        "raw_reward": [1.0 for _ in samples],
    } | more


def converted(hook):
    with function_registry.temporary("user.convert", hook):
        return asyncio.run(convert("user.convert", Namespace(), groups()))


async def slowly(args, samples):
    return columns(samples)


@pytest.mark.parametrize("hook", [slowly, lambda args, samples: columns(samples)])
def test_what_the_trainer_needs_besides_is_that_of_the_samples(hook):
    batch = converted(hook)
    assert batch["group_ids"] == [7, 7, 9, 9, 9]
    assert batch["sample_indices"] == [0, 1, 2, 3, 4]
    assert batch["rollout_ids"] == [0, 1, 2, 33, 33]


def test_samples_may_be_left_out_and_keep_their_groups():
    def hook(args, samples):
        kept = [s for s in reversed(samples) if s.index != 1]
        return columns(kept, sample_indices=[s.index for s in kept])

    batch = converted(hook)
    assert batch["group_ids"] == [9, 9, 9, 7]
    assert batch["rollout_ids"] == [33, 33, 2, 0]


def test_trainer_takes_the_rewards_as_they_are():
    batch = converted(lambda args, samples: columns(samples, rewards=np.arange(5.0), dynamic_global_batch_size=4))
    [samples] = read_batch(batch, TrainSettings(), optimizer_steps=1, vocabulary=9)
    assert [s.advantage for s in samples] == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_what_only_a_likelihood_needs_is_enough_for_it():
    def hook(args, samples):
        return {name: v for name, v in columns(samples).items() if name not in ("raw_reward", "rollout_log_probs")}

    train = TrainSettings(loss_type="sft_loss", compute_advantages_and_returns=False)
    [samples] = read_batch(converted(hook), train, optimizer_steps=1, vocabulary=9)
    assert len(samples) == 5


def test_mask_sums_of_whole_rollouts_are_those_of_the_masks():
    assert "rollout_mask_sums" not in converted(lambda a, s: columns(s, rollout_mask_sums=[2, 2, 2, 4, 4]))


BAD = {
    "returned a list; a dict of columns works": lambda a, s: [s],
    "the dict has no tokens and no loss_masks; it has response_lengths": lambda a, s: {"response_lengths": [1]},
    "but tokens 5, raw_reward 1": lambda a, s: columns(s, raw_reward=[1.0]),
    "raw_reward is a float; a list works": lambda a, s: columns(s, raw_reward=1.0),
    "4 rows for 5 samples, and no sample_indices": lambda a, s: columns(s[1:]),
    "sample_indices has 17, which is no sample of the batch": lambda a, s: columns(s, sample_indices=[0, 1, 2, 3, 17]),
    "response_lengths of sample 0 is 5, of 4 tokens": lambda a, s: columns(s, response_lengths=[5, 2, 2, 2, 2]),
    "loss_masks of sample 1 has 1 entries for 2": lambda a, s: columns(s, loss_masks=[[1, 1], [1], *[[1, 1]] * 3]),
    "rewards of sample 2 is 'x'; a finite number or None": lambda a, s: columns(s, rewards=[1, None, "x", 0.5, 1]),
    "rollout_mask_sums of sample 3 is 2, the loss masks of its rollout add up to 4": (
        lambda a, s: columns(s, rollout_mask_sums=[2] * 5)
    ),
}


@pytest.mark.parametrize("said", BAD)
def test_what_does_not_fit_is_one_error_that_names_the_hook(said):
    with pytest.raises(HookError, match=rf"^user\.convert.*{re.escape(said)}"):
        converted(BAD[said])


def test_hook_that_raises_is_named_with_its_line():
    def hook(args, samples):
        return samples[99]

    with pytest.raises(HookError, match=r"user\.convert failed on .*IndexError.*test_convert_hook\.py:\d+"):
        converted(hook)
