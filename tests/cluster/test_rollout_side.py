"""What the ring gets for a batch: the trainer's columns and the metrics, before and after a post-process hook."""

import asyncio
from types import SimpleNamespace

import pytest

from miles.cluster.actors import RolloutSide
from miles.config import Problems, Settings
from miles.engine.backends import BACKENDS
from miles.hooks import function_registry
from miles.rollout.rm_hub import Rewards
from miles.rollout.rm_hub.scorer import ScorerStatistics
from miles.types import Batch, FinishedGroup, Sample

STATUS = {"wasted_tokens": 0, "masked_tokens": 0, "given_up": {}, "length_bias": None, "outstanding_groups": 0}
STATUS |= {"masked_length_bias": 0.75}


def sample(index, reward):
    return Sample(
        index=index, tokens=[1, 2], response_length=1, rollout_log_probs=[-0.5], reward=reward, submit_version=1
    )


def taken(*flags, timed_out=0):
    """(columns, metrics) of a batch of one group with rewards 3 and 1."""
    settings = Settings.parse(flags, Problems())
    group = FinishedGroup(0, [sample(0, {"score": 3.0}), sample(1, {"score": 1.0})], 1, 1)

    async def take_batch(step):
        return Batch(step, 1, (group,))

    side = RolloutSide(settings, BACKENDS["local"], range(1))
    side._args = settings.namespace()
    side._rollouts = SimpleNamespace(take_batch=take_batch, status=lambda: STATUS, engine_idle=lambda: 0.25)
    scorer = SimpleNamespace(statistics=lambda: ScorerStatistics(timed_out=timed_out))
    side._rewards = Rewards(side._args, scorer)
    side._source = None
    return asyncio.run(side.take_batch(0))


def test_reward_key_is_what_is_trained_and_shown():
    data, metrics = taken("--reward-key", "score", timed_out=3)
    assert (data["raw_reward"], metrics["rollout/raw_reward"]) == ([3.0, 1.0], 2.0)
    assert "rewards" not in data
    assert metrics["rollout/reward_timeouts"] == 3.0
    assert (metrics["perf/engine_idle_ratio"], metrics["rollout/masked_length_bias"]) == (0.25, 0.75)
    assert "rollout/length_bias" not in metrics


def test_post_processed_rewards_are_trained_and_its_raw_ones_shown():
    """No --reward-key: the hook alone says what the number in an object is."""

    def hook(args, samples):
        raw = [s.reward["score"] for s in samples]
        return raw, [reward - 2.0 for reward in raw]

    with function_registry.temporary("user.post", hook):
        data, metrics = taken("--custom-reward-post-process-path", "user.post")
    assert (data["raw_reward"], data["rewards"]) == ([3.0, 1.0], [1.0, -1.0])
    assert metrics["rollout/raw_reward"] == 2.0


def test_object_without_a_key_stops_the_run():
    with pytest.raises(Exception, match=r"sample 0 is an object and no --reward-key is set; its keys: score"):
        taken()
