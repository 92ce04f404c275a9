"""Laws of rewards: whose wish counts, what a hook may return, and that no failure becomes a reward."""

import asyncio
from argparse import Namespace

import numpy as np
import pytest

from miles.errors import EngineFailed, HookError, RewardFailed, SettingsError
from miles.hooks import function_registry
from miles.rollout.rm_hub import Rewards, async_rm, batched_async_rm, use_scorer
from miles.rollout.rm_hub.scorer import DirectScorer
from miles.sim import clock
from miles.types import RewardSpec, Sample


def args(**values):
    return Namespace(**{"rm_type": "exact_match", "custom_rm_path": None, "reward_key": None} | values)


def sample(response="2", label="2", **values):
    return Sample(index=7, response=response, label=label, **values)


def run(coroutine_function, *arguments, scorer=None, **kwargs):
    """Runs a reward function in virtual time."""

    async def main():
        use_scorer(scorer or DirectScorer())
        return await coroutine_function(*arguments, **kwargs)

    return clock.run(main())


def hook(function):
    return function_registry.temporary("user.rm", function)


# ---- whose wish counts


@pytest.mark.parametrize(("run_type", "metadata", "spec", "reward"), [
    ("exact_match", {}, None, 0.0),
    ("math", {}, None, 1.0),
    ("exact_match", {"rm_type": "math"}, None, 1.0),
    ("math", {"rm_type": "exact_match"}, None, 0.0),
    ("exact_match", {"rm_type": "exact_match"}, RewardSpec(rm_type="math"), 1.0),
    (None, {"rm_type": "math"}, RewardSpec(), 1.0),
])  # fmt: skip
def test_own_type_comes_before_the_runs(run_type, metadata, spec, reward):
    wish = sample("2.0", "2", metadata=metadata, reward_spec=spec)
    assert run(async_rm, args(rm_type=run_type), wish) == reward


def test_custom_function_comes_before_any_type():
    with hook(lambda args, sample: 5), function_registry.temporary("own.rm", lambda args, sample: 6):
        custom = args(custom_rm_path="user.rm")
        assert run(async_rm, custom, sample()) == 5.0
        assert run(async_rm, custom, sample(reward_spec=RewardSpec(rm_type="math"))) == 5.0
        assert run(async_rm, custom, sample(reward_spec=RewardSpec(custom_rm_path="own.rm"))) == 6.0


@pytest.mark.parametrize(("rm_type", "response", "reward"), [
    ("boxed_exact_match", r"so \boxed{2}", 1.0), ("boxed_exact_match", "2", 0.0),
    ("boxed_math", r"\boxed{\frac{4}{2}}", 1.0), ("boxed_math", "2", 0.0),
])  # fmt: skip
def test_boxed_types_score_the_box_alone(rm_type, response, reward):
    assert run(async_rm, args(rm_type=rm_type), sample(response)) == reward


@pytest.mark.parametrize("rm_type", [None, "", "maths", "boxed_", "boxed_boxed_math"])
def test_unknown_type_lists_the_known_ones(rm_type):
    with pytest.raises(SettingsError, match=r"sample 7 wants reward type .*: there are exact_match, math") as caught:
        run(async_rm, args(rm_type=rm_type), sample())
    assert isinstance(caught.value, NotImplementedError)


@pytest.mark.parametrize("label", [None, ""])
def test_missing_label_is_no_zero(label):
    with pytest.raises(RewardFailed, match="sample 7 has no label"):
        run(async_rm, args(), sample(label=label))


def test_types_without_labels_need_none():
    assert run(async_rm, args(rm_type="deterministic_random"), sample(label=None)) in (0.0, 1.0)


def test_types_get_the_metadata_that_they_read():
    instructions = {"rm_type": "ifbench", "instruction_id_list": ["format:no_whitespace"], "other": object()}
    assert run(async_rm, args(), sample("ab", None, metadata=instructions)) == 1.0
    assert run(async_rm, args(), sample("a b", None, metadata=instructions)) == 0.0


def test_object_rewards_come_whole():
    reward = run(async_rm, args(rm_type="dapo"), sample("Answer: 2"))
    assert reward == {"score": 1.0, "acc": True, "pred": "2"}


def test_fault_of_the_data_names_the_sample():
    with pytest.raises(RewardFailed, match=r"sample 7: dapo failed: .*'1/2' is no integer"):
        run(async_rm, args(rm_type="dapo"), sample(label="1/2"))


# ---- the user's function


async def async_hook(args, sample):
    return 1.0


class AsyncCallable:
    async def __call__(self, args, sample):
        return 1.0


@pytest.mark.parametrize("function", [async_hook, AsyncCallable(), lambda a, s: async_hook(a, s), lambda a, s: 1.0])
def test_hooks_may_be_plain_or_async(function):
    with hook(function):
        assert run(async_rm, args(custom_rm_path="user.rm"), sample()) == 1.0


@pytest.mark.parametrize(("value", "reward"), [
    (1, 1.0), (True, 1.0), (np.float32(0.5), 0.5), (np.array(2), 2.0), ({"score": 1}, {"score": 1}), (None, None),
])  # fmt: skip
def test_numbers_objects_and_none_are_rewards(value, reward):
    with hook(lambda args, sample: value):
        assert run(async_rm, args(custom_rm_path="user.rm"), sample()) == reward


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "1", [1.0], object()])
def test_other_values_are_refused(value):
    with hook(lambda args, sample: value), pytest.raises(HookError, match=r"user.rm returned .* for sample 7"):
        run(async_rm, args(custom_rm_path="user.rm"), sample())


def failing_hook(args, sample):
    return int("no number")  # the line that the error names


def test_failing_hook_is_named_with_sample_and_line():
    line = failing_hook.__code__.co_firstlineno + 1
    with hook(failing_hook), pytest.raises(HookError) as caught:
        run(async_rm, args(custom_rm_path="user.rm"), sample())
    assert str(caught.value).startswith("user.rm failed on sample 7: ValueError: invalid literal")
    assert str(caught.value).endswith(f"test_rewards.py:{line})")
    assert isinstance(caught.value.__cause__, ValueError)


def test_hook_can_say_that_the_engine_failed():
    def engine_hook(args, sample):
        raise EngineFailed("the judge answered 500")

    with hook(engine_hook), pytest.raises(EngineFailed):
        run(async_rm, args(custom_rm_path="user.rm"), sample())


def test_missing_hook_is_an_error():
    with pytest.raises(HookError, match=r"no_such_module\.rm"):
        run(async_rm, args(custom_rm_path="no_such_module.rm"), sample())


# ---- together


def test_group_goes_to_the_hook_in_one_call():
    calls = []
    with hook(lambda args, samples: calls.append(samples) or [float(len(s.response)) for s in samples]):
        group = [sample("a"), sample("bb")]
        assert run(batched_async_rm, args(custom_rm_path="user.rm"), group, inplace_set_reward_field=True) == [1.0, 2.0]
    assert calls == [group]
    assert [s.reward for s in group] == [1.0, 2.0]


@pytest.mark.parametrize("value", [[1.0], [1.0] * 3, 1.0, None, {"a": 1, "b": 2}, "ab"])
def test_batch_hook_returns_one_reward_per_sample(value):
    with hook(lambda args, samples: value), pytest.raises(HookError, match="for 2 samples"):
        run(batched_async_rm, args(custom_rm_path="user.rm"), [sample(), sample()])


def test_batch_without_a_hook_scores_each_by_its_own_wish():
    group = [sample("2.0", metadata={"rm_type": "math"}), sample("2.0"), sample("2")]
    assert run(batched_async_rm, args(), group) == [1.0, 0.0, 1.0]
    assert [s.reward for s in group] == [None] * 3


def test_samples_with_other_hooks_are_scored_one_by_one():
    with hook(lambda args, sample: len(sample.response)):
        group = [sample("abc", reward_spec=RewardSpec(custom_rm_path="user.rm")), sample()]
        assert run(batched_async_rm, args(), group) == [3.0, 1.0]


def test_verdicts_stay_when_a_sibling_fails():
    group = [sample(label=None), sample(), sample("3")]
    with pytest.raises(RewardFailed):
        run(Rewards(args(), DirectScorer()).score, group, group=False)
    assert [s.reward for s in group] == [None, 1.0, 0.0]


@pytest.mark.parametrize("group", [True, False])
def test_rewards_are_set_on_the_samples(group):
    samples, scorer = [sample(), sample("3")], DirectScorer()
    run(Rewards(args(), scorer).score, samples, group=group)
    assert [s.reward for s in samples] == [1.0, 0.0]
    assert scorer.statistics().scored == 2


def test_group_flag_chooses_the_batch_form():
    seen = []
    with hook(lambda args, given: seen.append(type(given)) or ([1.0] if isinstance(given, list) else 1.0)):
        rewards = Rewards(args(custom_rm_path="user.rm"), DirectScorer())
        run(rewards.score, [sample()], group=True)
        run(rewards.score, [sample()], group=False)
    assert seen == [list, Sample]


# ---- in virtual time


def test_direct_scorer_takes_virtual_time():
    async def main():
        await scorer.score("exact_match", "2", "2")
        return asyncio.get_running_loop().time()

    scorer = DirectScorer(answer_s=3.0)
    assert clock.run(main()) == 3.0


def test_fault_in_reward_code_is_counted_and_no_reward():
    async def main():
        with pytest.raises(RewardFailed, match="exact_match failed"):
            await scorer.score("exact_match", None, "2")

    scorer = DirectScorer()
    clock.run(main())
    assert (scorer.statistics().failed, scorer.statistics().scored) == (1, 0)
