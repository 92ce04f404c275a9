"""What the ring gets for a batch: the trainer's columns and the metrics, before and after a post-process hook."""

import asyncio
from types import SimpleNamespace

import pytest

from miles.cluster.actors import RolloutSide
from miles.config import Problems, Settings
from miles.engine.backends import BACKENDS
from miles.errors import HookError
from miles.hooks import function_registry
from miles.rollout.base_types import RolloutFnEvalOutput
from miles.rollout.rm_hub import Rewards
from miles.rollout.rm_hub.scorer import ScorerStatistics
from miles.types import Batch, FinishedGroup, Sample

STATUS = {"wasted_tokens": 0, "masked_tokens": 0, "given_up": {}, "length_bias": None, "outstanding_groups": 0}
STATUS |= {"masked_length_bias": 0.75}


def sample(index, reward):
    return Sample(
        index=index, tokens=[1, 2], response_length=1, rollout_log_probs=[-0.5], reward=reward, submit_version=1
    )


EVALUATION = RolloutFnEvalOutput(
    {"held_out": {"rewards": [1.0, 0.0], "samples": [Sample(prompt="a"), Sample(prompt="b")]}}, {"eval/own": 3.0}
)


def side_of(*flags, timed_out=0):
    """A rollout side whose batch is one group with rewards 3 and 1 and whose evaluation is ``EVALUATION``."""
    settings = Settings.parse(flags, Problems())
    group = FinishedGroup(0, [sample(0, {"score": 3.0}), sample(1, {"score": 1.0})], 1, 1)

    async def take_batch(step):
        await asyncio.sleep(0.01)
        return Batch(step, 1, (group,), {"rollout/own": 2.0})

    async def evaluate(step):
        return EVALUATION

    side = RolloutSide(settings, BACKENDS["local"], range(1))
    side._args = settings.namespace()
    side._rollouts = SimpleNamespace(
        take_batch=take_batch, evaluate=evaluate, status=lambda: STATUS, engine_idle=lambda: 0.25
    )
    scorer = SimpleNamespace(statistics=lambda: ScorerStatistics(timed_out=timed_out))
    side._rewards = Rewards(side._args, scorer)
    side._source = None
    return side


def taken(*flags, timed_out=0):
    """(columns, metrics) of that batch."""
    return asyncio.run(side_of(*flags, timed_out=timed_out).take_batch(0))


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


# ---- log functions


@pytest.mark.parametrize("skips", [True, False, None])
def test_a_rollout_log_function_sees_the_batch_adds_metrics_and_may_skip_the_rest(skips):
    seen = []

    def log(rollout_id, args, samples, extra_metrics, rollout_time):
        seen.append((rollout_id, args.reward_key, [s.index for s in samples], dict(extra_metrics), rollout_time > 0))
        extra_metrics["mine"] = len(samples)
        return skips

    with function_registry.temporary("user.log", log):
        data, metrics = taken("--reward-key", "score", "--custom-rollout-log-function-path", "user.log")
    assert seen == [(0, "score", [0, 1], {"rollout/own": 2.0}, True)]
    assert data["raw_reward"] == [3.0, 1.0]
    shown = {name: metrics.get(name) for name in ("rollout/own", "rollout/mine", "rollout/raw_reward")}
    assert (
        shown == dict.fromkeys(shown) if skips else {"rollout/own": 2.0, "rollout/mine": 2.0, "rollout/raw_reward": 2.0}
    )
    assert "rollout/wasted_tokens" in metrics


@pytest.mark.parametrize("skips", [True, False])
def test_an_evaluation_log_function_sees_each_set_adds_metrics_and_may_skip_the_rest(skips):
    seen = []

    async def log(rollout_id, args, data, extra_metrics):
        seen.append((rollout_id, data, dict(extra_metrics)))
        extra_metrics["mine"] = 4
        return skips

    with function_registry.temporary("user.log", log):
        metrics = asyncio.run(side_of("--custom-eval-rollout-log-function-path", "user.log").evaluate(7))
    assert seen == [(7, EVALUATION.data, {"eval/own": 3.0})]
    told = {"eval/own": 3.0, "eval/mine": 4.0, "eval/held_out": 0.5, "eval/held_out-pass@1": 0.5,
            "eval/held_out-none_reward_ratio": 0.0, "eval/held_out-truncated_ratio": 0.0}  # fmt: skip
    assert metrics == ({} if skips else told)


def test_a_log_function_that_fails_names_itself_what_it_failed_on_and_its_own_line():
    def log(*given):
        raise KeyError("mine")

    where = r" failed on {}: KeyError: 'mine' \(.*test_rollout_side\.py:\d+\)"
    with function_registry.temporary("user.log", log):
        with pytest.raises(HookError, match=r"user\.log" + where.format("the batch of step 0")):
            taken("--reward-key", "score", "--custom-rollout-log-function-path", "user.log")
        with pytest.raises(HookError, match=r"user\.log" + where.format("the evaluation after step 7")):
            asyncio.run(side_of("--custom-eval-rollout-log-function-path", "user.log").evaluate(7))


# ---- switches


def test_passrate_of_a_batch_is_logged_where_told():
    told = ("--reward-key", "score", "--log-passrate")
    _, metrics = taken(*told)
    assert {k: v for k, v in metrics.items() if "pass" in k} == {"passrate/pass@1": 1.0, "passrate/pass@2": 1.0}
    assert not [k for k in taken(*told[:2])[1] if "pass" in k]


def test_categories_are_those_of_the_reward_objects_even_after_a_post_process_hook():
    def hook(args, samples):
        rewards = [s.reward["score"] for s in samples]
        return rewards, rewards

    with function_registry.temporary("user.post", hook):
        flags = ("--custom-reward-post-process-path", "user.post", "--log-reward-category", "score")
        _, metrics = taken(*flags)
    assert {k: v for k, v in metrics.items() if "error_cat" in k} == {
        "rollout/error_cat/1.0": 0.5, "rollout/error_cat/3.0": 0.5,
    }  # fmt: skip
