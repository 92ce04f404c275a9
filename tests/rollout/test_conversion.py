"""Laws of the trainer's columns: which number of a reward is trained, and what a post-process hook may make of it."""

import asyncio
from argparse import Namespace

import numpy as np
import pytest

from miles.errors import HookError, RewardFailed
from miles.hooks import function_registry
from miles.rollout.conversion import to_train_data
from miles.rollout.post_process import post_process
from miles.types import FinishedGroup, Sample

ARGS = Namespace(reward_key=None)


def sample(index, reward):
    return Sample(index=index, tokens=[1, 2], response_length=1, rollout_log_probs=[-0.5], reward=reward)


def groups(*rewards):
    return [FinishedGroup(i, [sample(i, reward)], 1, 1) for i, reward in enumerate(rewards)]


def processed(hook, *rewards):
    with function_registry.temporary("user.post", hook):
        return asyncio.run(post_process("user.post", ARGS, groups(*rewards)))


def test_key_picks_the_trained_number_of_an_object():
    data = to_train_data(groups({"score": 1.0, "acc": True}, 0.5, None), "score")
    assert data["raw_reward"] == [1.0, 0.5, None]
    assert "rewards" not in data


@pytest.mark.parametrize(("reward", "key", "said"), [
    ({"score": 1.0}, None, "reward of sample 0 is an object and no --reward-key is set; its keys: score"),
    ({"score": 1.0}, "acc", "reward of sample 0 is an object and --reward-key acc is not there; its keys: score"),
    ({"pred": "42"}, "pred", "reward of sample 0 is '42', which is no number"), ("42", None, "is no number"),
])  # fmt: skip
def test_reward_without_a_number_is_an_error_and_no_zero(reward, key, said):
    with pytest.raises(RewardFailed, match=said):
        to_train_data(groups(reward), key)


async def centred(args, samples):
    raw = [s.reward["score"] for s in samples]
    return raw, np.array(raw) - np.mean(raw)


@pytest.mark.parametrize("hook", [centred, lambda args, samples: asyncio.run(centred(args, samples))])
def test_hook_makes_the_raw_rewards_and_those_that_are_trained(hook):
    batch = groups({"score": 1.0}, {"score": 0.0})
    with function_registry.temporary("user.post", hook):
        shown, rewards = asyncio.run(post_process("user.post", ARGS, batch))
    assert rewards == [0.5, -0.5]
    assert [g.samples[0].reward for g in batch] == [{"score": 1.0}, {"score": 0.0}]
    data = to_train_data(shown, None, rewards)
    assert (data["raw_reward"], data["rewards"]) == ([1.0, 0.0], [0.5, -0.5])


def test_hook_sees_every_sample_of_compact_siblings_in_order():
    siblings = FinishedGroup(5, [[sample(1, 0.0), sample(2, 0.0)], sample(3, 0.0)], 1, 1)
    with function_registry.temporary("user.post", lambda args, samples: ([float(s.index) for s in samples], [0.0] * 3)):
        (shown,), _ = asyncio.run(post_process("user.post", ARGS, [siblings]))
    (first, second), third = shown.samples
    assert [first.reward, second.reward, third.reward] == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(("result", "said"), [
    ([1.0], r"returned \[1.0\]; \(raw rewards, rewards\) with 2 numbers each works"), (None, "returned None"),
    (([1.0, 2.0], [1.0]), "returned 2 and 1 rewards for 2 samples"), (([1.0, 2.0], 1.0), "2 and no list rewards"),
    (([1.0, 2.0], [float("nan"), 0.0]), "returned nan among the rewards"), (([{}, 1.0], [0.0, 0.0]), "returned {} among"),
])  # fmt: skip
def test_hook_returns_a_pair_with_one_number_for_each_sample(result, said):
    with pytest.raises(HookError, match=f"user.post {said}|user.post returned {said}"):
        processed(lambda args, samples: result, 1.0, 0.0)


def test_failing_hook_is_named_with_its_line():
    def failing(args, samples):
        return samples[7]

    with pytest.raises(HookError, match=r"user\.post failed on the 2 samples of a batch: IndexError: .*\.py:\d+\)"):
        processed(failing, 1.0, 0.0)
