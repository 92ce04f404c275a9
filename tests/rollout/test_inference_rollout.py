"""What a rollout function of the user's own may call, inside a run: on its loop, on another, and with what it gets wrong."""

import asyncio
import threading
from argparse import Namespace
from collections import deque

import pytest

from miles import loops
from miles.engine.fake import FakeEngine, FakeFleet, Say, Status
from miles.errors import EngineFailed
from miles.hooks import function_registry
from miles.rollout import core, sglang_rollout
from miles.rollout.base_types import GenerateFnOutput, RolloutFnTrainOutput
from miles.rollout.inference_rollout.inference_rollout_common import (
    GenerateState,
    generate_and_rm,
    generate_and_rm_group,
)
from miles.rollout.scoring import DirectScoring
from miles.rollout.staleness import Versions
from miles.sim import clock
from miles.types import Sample
from tests.virtual import settings_of, simulation

FLAGS = "--rollout-batch-size 2 --n-samples-per-prompt 4 --num-rollout 3 --rollout-max-response-len 64 "


def within_run(work, flags="", engine=None, reward=lambda sample: 1.0):
    """What ``await work(args)`` gives where a run's core is there."""
    settings = settings_of("--fully-async " + FLAGS + flags)

    async def main():
        client = core.make_client(settings, FakeFleet({"http://e:1": engine or FakeEngine()}))
        client.table.add_fixed("http://e:1")
        versions = Versions()
        versions.raise_to(3, 1)
        scoring = DirectScoring(reward)
        made = core.Core(client, versions, lambda p, tools: [1, 2], None, scoring, asyncio.get_running_loop())
        core.adopt(made)
        return await work(settings.namespace())

    return clock.run(main())


def prompts(count=4):
    return [Sample(index=i, prompt="p") for i in range(count)]


def test_a_group_is_generated_and_scored_on_one_engine_with_seeds_of_their_own():
    engine, done = FakeEngine(), []

    async def work(args):
        state = GenerateState(args)
        return await generate_and_rm_group(state, prompts(), state.sampling_params, sample_done_callback=done.append)

    group = within_run(work, engine=engine)
    assert [s.reward for s in group] == [1.0] * 4 and len(done) == 4
    assert {s.submit_version for s in group} == {3} and len({s.routing_key for s in group}) == 1
    seeds = [r["sampling_params"]["sampling_seed"] for r in engine.requests]
    assert len(set(seeds)) == 4 and len({r["rid"] for r in engine.requests}) == 4


def test_both_eras_names_are_one_generation():
    async def work(args):
        state = sglang_rollout.GenerateState(args)
        assert isinstance(state, GenerateState)
        alone = await sglang_rollout.generate(args, Sample(index=0, prompt="p"), state.sampling_params)
        group = await sglang_rollout.generate_and_rm_group(args, prompts(), state.sampling_params)
        return alone, group

    alone, group = within_run(work)
    assert alone.response_length == 4 and alone.reward is None
    assert [s.reward for s in group] == [1.0] * 4


def test_only_what_lacks_a_reward_and_was_not_aborted_is_scored():
    scored = []

    async def work(args):
        state = GenerateState(args)
        scored_before = Sample(index=0, prompt="p", reward=0.5)
        finished = Sample(index=1, prompt="p", status=Sample.Status.COMPLETED)
        return [
            await generate_and_rm(state, s, state.sampling_params) for s in (scored_before, finished, prompts(3)[2])
        ]

    engine = FakeEngine(script=deque([Say(3), Say(2, "abort")]))
    before, finished, aborted = within_run(work, engine=engine, reward=lambda s: scored.append(s.index) or 1.0)
    assert (before.reward, finished.reward, aborted.reward) == (0.5, 1.0, None)
    assert scored == [1] and len(engine.requests) == 2
    assert aborted.status is Sample.Status.ABORTED


def test_an_aborted_state_starts_nothing_until_it_is_reset():
    engine = FakeEngine()

    async def work(args):
        state = GenerateState(args)
        state.aborted = True
        first = await generate_and_rm(state, prompts(1)[0], state.sampling_params)
        state.reset()
        return first, await generate_and_rm(state, prompts(1)[0], state.sampling_params)

    first, second = within_run(work, engine=engine)
    assert (first.status, second.status) == (Sample.Status.ABORTED, Sample.Status.COMPLETED)
    assert len(engine.requests) == 1


def test_a_failure_cancels_its_siblings_and_is_raised_itself():
    engine = FakeEngine(script=deque([Say(60), Status(500), Say(60), Say(60)]), token_s=10.0)

    async def work(args):
        state = GenerateState(args)
        with pytest.raises(EngineFailed):
            await generate_and_rm_group(state, prompts(), state.sampling_params)
        return asyncio.get_running_loop().time()

    assert within_run(work, engine=engine) < 10


def test_group_rewards_are_asked_once_for_all_and_never_in_evaluation():
    asked = []

    class Scoring:
        async def score(self, samples, *, group):
            asked.append((len(samples), group))

    async def work(args):
        state = GenerateState(args, core.Core(**{**vars(core.core_of(args)), "scoring": Scoring()}))
        await generate_and_rm_group(state, prompts(), state.sampling_params)
        await generate_and_rm_group(state, prompts(2), state.sampling_params, evaluation=True)

    within_run(work, "--group-rm")
    assert asked == [(4, True), (1, False), (1, False)]


def test_a_custom_generate_function_is_used_and_its_siblings_are_stamped():
    async def twice(input):
        return GenerateFnOutput([Sample(tokens=[1, 2], response_length=1, rollout_log_probs=[0.0]) for _ in range(2)])

    async def work(args):
        state = GenerateState(args)
        return await generate_and_rm(state, Sample(index=9, prompt="p"), state.sampling_params)

    with function_registry.temporary("user.twice", twice):
        siblings = within_run(work, "--custom-generate-function-path user.twice")
    assert [(s.index, s.submit_version, s.reward) for s in siblings] == [(9, 3, 1.0)] * 2


def test_a_rollout_function_on_a_loop_of_its_own_reaches_the_runs_engines():
    """As a plain function of the user's does, which runs on a thread: asyncio.run there, the engines' loop here."""
    settings = settings_of("--fully-async " + FLAGS)
    seen = []

    async def on_the_runs_loop():
        client = core.make_client(settings, FakeFleet({"http://e:1": FakeEngine(token_s=0.0)}))
        client.table.add_fixed("http://e:1")
        scoring = DirectScoring(lambda sample: seen.append(threading.current_thread()) or 1.0)
        core.adopt(core.Core(client, None, lambda p, tools: [1], None, scoring, asyncio.get_running_loop()))

    loops.run(on_the_runs_loop())
    try:
        args = settings.namespace()
        state = GenerateState(args)
        group = asyncio.run(generate_and_rm_group(state, prompts(2), state.sampling_params))
    finally:
        loops.stop()
    assert [s.reward for s in group] == [1.0, 1.0]
    assert threading.current_thread() not in seen


@pytest.mark.parametrize("program", ["train", "train_async"])
def test_a_rollout_functions_metrics_reach_the_step(program):
    async def rollout(args, rollout_id, data_source):
        state = GenerateState(args)
        groups = [await generate_and_rm_group(state, g, state.sampling_params) for g in data_source.get_samples(2)]
        return RolloutFnTrainOutput(groups, {"asked": rollout_id, "user/depth": 2})

    sim = simulation(
        FLAGS.replace("--num", "--rollout-function-path user.rollout --num") + "--one-step-off", program=program
    )
    with function_registry.temporary("user.rollout", rollout):
        clock.run(sim.run())
    assert [sim.record.steps[i]["rollout/asked"] for i in range(3)] == [0.0, 1.0, 2.0]
    assert sim.record.steps[2]["user/depth"] == 2.0
    assert all(s.reward is not None for b in sim.trainer.batches for g in b.groups for s in g.samples)


def test_a_state_can_be_made_from_args_that_are_not_ours():
    """First-era callers bring namespaces of their own."""

    async def work(args):
        return GenerateState(Namespace(rollout_temperature=0.5, rollout_max_response_len=7))

    state = within_run(work)
    assert (state.sampling_params["temperature"], state.sampling_params["max_new_tokens"]) == (0.5, 7)
    assert state.version == 3
    names = "args tokenizer processor generate_fn_semaphore sampling_params generate_function aborted reset"
    assert all(hasattr(state, name) for name in names.split())
