"""A user's evaluation function in each of its forms, on the virtual clock; what it returns is what is measured."""

import asyncio
import threading
from typing import ClassVar

import pytest

from miles.config import Problems
from miles.errors import HookError
from miles.hooks import function_registry
from miles.observe.metrics import eval_metrics
from miles.rollout.base_types import RolloutFnEvalInput, RolloutFnEvalOutput, RolloutFnTrainOutput
from miles.rollout.check import check
from miles.rollout.evaluation import eval_groups
from miles.rollout.rollout_function import RolloutFunction
from miles.types import Sample
from tests.virtual import settings_of, simulate

SMALL = (
    "--rollout-batch-size 2 --n-samples-per-prompt 2 --num-rollout 4 --rollout-max-response-len 8 --eval-interval 2 "
)
EVAL = "--eval-function-path user.evaluate"


def run(function, flags=EVAL, **more):
    with function_registry.temporary("user.evaluate", function):
        return simulate(SMALL + flags, **more)


class Evaluate:
    """The class form: each evaluation is asked of an instance that is made once."""

    made = 0

    def __init__(self, input):
        type(self).made += 1
        self.args = input.args

    async def __call__(self, input):
        assert input.evaluation and input.generate_state.args is self.args
        return RolloutFnEvalOutput({"own": {"rewards": [float(input.weight_version)]}}, {"asked": input.rollout_id})


def test_a_class_is_made_once_and_gets_the_version_that_it_evaluates():
    Evaluate.made = 0
    sim = run(Evaluate)
    assert Evaluate.made == 1
    assert [e.data["own"]["rewards"] for e in sim.direct.evaluations] == [[1.0], [3.0], [5.0]]
    assert [m["eval/weight_version"] for m in sim.record.evaluations.values()] == [1, 3, 5]
    assert {step: m["eval/asked"] for step, m in sim.record.evaluations.items()} == {0: 0.0, 2: 1.0, 4: 3.0}


def test_a_function_is_called_with_evaluation_and_may_return_plain_data():
    seen = []

    async def evaluate(args, rollout_id, data_source, evaluation=False):
        seen.append((args.rollout_batch_size, rollout_id, hasattr(data_source, "get_samples"), evaluation))
        return {"own": {"rewards": [1.0, None], "truncated": [False, True]}}

    sim = run(evaluate)
    assert seen == [(2, 0, True, True), (2, 1, True, True), (2, 3, True, True)]
    assert len(sim.trainer.batches) == 4


def test_a_plain_function_runs_on_a_thread_and_may_return_a_coroutine():
    def plain(args, rollout_id, data_source, evaluation=False):
        return threading.current_thread()

    thread = asyncio.run(RolloutFunction(plain, "user.f", None, None)(RolloutFnEvalInput(0)))
    assert thread is not threading.main_thread()
    wrapped = RolloutFunction(lambda *given, **more: asyncio.sleep(0, more), "user.f", None, None)
    assert asyncio.run(wrapped(RolloutFnEvalInput(0))) == {"evaluation": True}


def test_training_and_evaluation_share_one_instance_where_their_paths_are_equal():
    class Both:
        made: ClassVar = []

        def __init__(self, input):
            self.source, self.calls = input.data_source, []
            self.made.append(self)

        async def __call__(self, input):
            self.calls.append(input.evaluation)
            if input.evaluation:
                return RolloutFnEvalOutput({"own": {"rewards": [1.0]}})
            groups = self.source.get_samples(2)
            for sample in (s for group in groups for s in group):
                sample.tokens, sample.response_length, sample.loss_mask = [1, 2], 1, [1]
                sample.rollout_log_probs, sample.reward, sample.status = [-0.5], 1.0, Sample.Status.COMPLETED
            return RolloutFnTrainOutput(groups)

    run(Both, EVAL + " --rollout-function-path user.evaluate", program="train")
    [both] = Both.made
    assert both.calls == [True, False, False, True, False, False, True]


@pytest.mark.parametrize(("returned", "said"), [
    ([1.0], r"user\.evaluate returned \[1\.0\] for the evaluation after step 0; a dict of set names"),
    ({"a": {"rewards": [1.0], "truncated": []}}, "of the same length, truncated and samples"),
    ({"a": {}}, "each with its rewards"),
    (RolloutFnEvalOutput({}, {"mine": "text"}), "user.evaluate gave 'text' for 'mine'; a number"),
])  # fmt: skip
def test_what_is_no_evaluation_is_named(returned, said):
    async def evaluate(*given, **more):
        return returned

    with pytest.raises(HookError, match=said):
        run(evaluate)


def test_a_function_that_fails_names_itself_the_evaluation_and_its_own_line():
    async def evaluate(*given, **more):
        raise KeyError("mine")

    said = r"user\.evaluate failed on the evaluation after step 0: KeyError: 'mine' \(.*test_eval_function\.py:\d+\)"
    with pytest.raises(HookError, match=said):
        run(evaluate)


def test_rewards_of_the_function_count_not_those_of_its_samples():
    samples = [Sample(group_index=i // 2, tokens=[1, 2], response_length=1, reward=9.0) for i in range(4)]
    data = {"rewards": [1.0, 0.0, 1.0, None], "samples": samples, "truncated": [True, False, False, False]}
    metrics = eval_metrics("own", eval_groups(data), reward_key=None)
    assert (metrics["eval/own"], metrics["eval/own-none_reward_ratio"]) == (2 / 3, 0.25)
    assert metrics["eval/own-pass@1"] == 0.75
    assert [s.reward for s in samples] == [9.0] * 4


def test_a_set_without_samples_has_rewards_and_no_lengths():
    metrics = eval_metrics("own", eval_groups({"rewards": [1.0, 0.0], "truncated": [True, False]}), reward_key=None)
    assert metrics == {
        "eval/own": 0.5, "eval/own-none_reward_ratio": 0.0, "eval/own-truncated_ratio": 0.5, "eval/own-pass@1": 0.5,
    }  # fmt: skip


def test_the_training_function_of_fully_async_runs_evaluates_nothing():
    path = "miles.rollout.fully_async_rollout.FullyAsyncRolloutFn"
    problems = Problems()
    check(settings_of(f"{SMALL} --fully-async --eval-function-path {path}"), problems)
    why = "makes training batches only; without this, --eval-prompt-data is evaluated"
    assert problems.lines == [f"--eval-function-path {path}: {why}"]
