"""The worker and the ring on the virtual clock, under scripted faults."""

import asyncio
import re
from collections import Counter, deque

import pytest

from miles.data.prompts import PromptSource
from miles.data.rows import Row
from miles.engine.client import parse_generation
from miles.engine.fake import FakeEngine, Hang, Raw, Reset, Say, Status
from miles.errors import HookError, RewardFailed, TooManyFailures, WorkerDied
from miles.hooks import function_registry
from miles.rollout.data_source import RolloutDataSourceWithBuffer
from miles.rollout.evaluation import EvalSet
from miles.rollout.filter_hub.base_types import DynamicFilterOutput
from miles.rollout.generation import sampling_seed
from miles.sim import clock
from miles.sim.control_plane import CountingSource
from miles.sim.trainer import FakeTrainer
from miles.types import Sample, iter_samples
from tests.virtual import (
    URLS,
    assert_every_prompt_is_accounted_for,
    settings_of,
    simulate,
    simulation,
    trained_prompts,
)

SMALL = "--rollout-batch-size 2 --n-samples-per-prompt 4 --num-rollout 3 --rollout-max-response-len 64 "
LONG_TAIL = lambda payload, rng: 1 + int(60 * rng.random() ** 4)  # noqa: E731


def scripted(*actions, **more):
    return FakeEngine(script=deque(actions), **more)


# ---- nothing lost, nothing twice


@pytest.mark.parametrize("bound", [0, 1, 2, 4, 8, None])
@pytest.mark.parametrize("interval", [1, 3])
def test_no_trained_token_is_older_than_the_bound(bound, interval):
    flags = "--rollout-batch-size 4 --n-samples-per-prompt 2 --num-rollout 20 --rollout-max-response-len 64 "
    flags += f"--update-weights-interval {interval} --async-max-concurrent-samples 40 "
    flags += "" if bound is None else f"--max-weight-staleness {bound}"
    sim = simulate(flags, FakeEngine(length=LONG_TAIL, token_s=0.05), FakeEngine(length=LONG_TAIL, token_s=0.02))
    assert len(sim.trainer.batches) == 20
    assert all(len(b.groups) == 4 for b in sim.trainer.batches)
    assert bound is None or max(sim.trainer.ages()) <= bound
    assert_every_prompt_is_accounted_for(sim)


def test_bound_zero_is_synchronous():
    sim = simulate(SMALL + "--max-weight-staleness 0", FakeEngine(length=LONG_TAIL))
    assert set(sim.trainer.ages()) == {0}
    assert sim.issued == 6
    assert trained_prompts(sim) == list(range(6))


def test_train_py_is_the_ring_with_bound_zero():
    sim = simulate(SMALL, FakeEngine(length=LONG_TAIL), program="train")
    assert set(sim.trainer.ages()) == {0}
    assert trained_prompts(sim) == list(range(6))


@pytest.mark.parametrize("interval", [1, 3])
def test_one_step_off_trains_blocks_in_order_at_age_one_at_most(interval):
    sim = simulate(
        SMALL + f"--one-step-off --update-weights-interval {interval}", FakeEngine(length=LONG_TAIL, token_s=0.1)
    )
    assert trained_prompts(sim) == list(range(6))
    assert max(sim.trainer.ages()) <= 1
    assert sim.issued == 6


def test_slots_are_never_exceeded_and_refill_by_sample():
    engine = FakeEngine(length=LONG_TAIL, token_s=0.05)
    sim = simulate(SMALL + "--async-max-concurrent-samples 10 --async-data-buffer-capacity-factor 8", engine)
    assert 8 < engine.most_running <= 10
    assert_every_prompt_is_accounted_for(sim)


def test_group_granularity_frees_all_slots_with_the_group():
    """One slow sample holds its group's four slots: by sample, the other three go to the next group."""
    flags = SMALL + "--async-max-concurrent-samples 8 "
    slow_first = lambda payload, rng: 60 if payload["rid"].split(".")[0] in ("0", "4") else 1  # noqa: E731
    by_group = simulate(flags + "--rollout-submission-granularity group", FakeEngine(length=slow_first))
    by_sample = simulate(flags, FakeEngine(length=slow_first))
    first = lambda sim: sim.record.steps[0]["perf/train_wait_time"]  # noqa: E731
    assert first(by_group) > first(by_sample)


def test_full_buffer_stops_generation():
    engine = FakeEngine(token_s=0.001)
    sim = simulation(SMALL + "--async-data-buffer-capacity-factor 1.5 --async-max-concurrent-samples 8", engine)
    sim.trainer.step_s = 1000.0
    clock.run(sim.run())
    taken, capacity, open_when_full = 3 * 2, 3, 2
    assert sim.issued <= taken + capacity + open_when_full


def test_groups_that_wait_for_their_rewards_count_as_buffered():
    """A slow grader holds generation back, instead of letting unscored groups pile up without a bound."""
    sim = simulation(SMALL + "--async-data-buffer-capacity-factor 1 --async-max-concurrent-samples 8", answer_s=1000.0)

    async def main():
        async with asyncio.timeout(900):
            await sim.run()

    with pytest.raises(TimeoutError):
        clock.run(main())
    assert sim.issued <= 2 + 2


def test_epochs_go_on_until_the_last_step():
    """W5: four prompts, batches of two, five steps: the data is drawn again, nothing spins or starves."""
    rows = [Row(i + 1, f"p{i}", None, {}) for i in range(4)]
    flags = "--rollout-batch-size 2 --n-samples-per-prompt 2 --num-rollout 5 --rollout-max-response-len 64 "
    source = RolloutDataSourceWithBuffer(settings_of(flags).namespace(), PromptSource(rows, shuffle=True, seed=1))
    sim = simulation(flags + "--max-weight-staleness 0", source=source)
    clock.run(sim.run())
    prompts = [g.samples[0].prompt for b in sim.trainer.batches for g in b.groups]
    assert len(prompts) == 10
    assert sorted(prompts[:4]) == sorted(prompts[4:8]) == ["p0", "p1", "p2", "p3"]


def test_a_batch_is_never_taken_before_it_is_full():
    """W12: engines that need far longer than anything else: the trainer waits, and gets whole batches only."""
    sim = simulate(SMALL, FakeEngine(token_s=50.0))
    assert [len(b.groups) for b in sim.trainer.batches] == [2, 2, 2]


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("interval", [1, 3])
def test_the_last_step_ends_cleanly(steps, interval):
    """W9: nothing waits for a batch that nobody will take; the last weights are published."""
    sim = simulate(
        f"--rollout-batch-size 2 --n-samples-per-prompt 2 --num-rollout {steps} --update-weights-interval {interval}"
    )
    assert len(sim.trainer.batches) == steps
    assert sim.rollouts.version >= 2


# ---- failures


def test_a_broken_connection_costs_no_sample():
    """W2, script 1: the fourth reply of a group breaks; the client repeats the request."""
    sim = simulate(SMALL, scripted(Say(3), Say(3), Say(3), Reset()))
    assert sim.rollouts.status()["given_up"] == {}
    assert_every_prompt_is_accounted_for(sim)


def test_a_request_that_never_answers_frees_its_slots_at_the_time_limit():
    """W2, W4, script 2: each attempt of the hanging sample ends at the limit, then its group is given up."""
    hangs = lambda payload: Hang() if payload["rid"].startswith("0.") else None  # noqa: E731
    sim = simulate(SMALL + "--rollout-sample-timeout-s 0.5 --rollout-retry-budget 2", FakeEngine(choose=hangs))
    assert sim.rollouts.status()["given_up"] == {"timeout": 1}
    assert 0 not in trained_prompts(sim)
    assert_every_prompt_is_accounted_for(sim)


def test_an_engine_that_only_fails_stops_the_run_with_the_first_cause():
    """W3, script 3: 500 for ever; the trainer's wait ends with the engine's own words."""
    engine = scripted(*[Status(500, "out of memory")] * 10_000)
    with pytest.raises(WorkerDied, match="out of memory") as died:
        simulate(SMALL + "--rollout-failure-limit 3", engine)
    assert isinstance(died.value.__cause__, TooManyFailures)
    assert "4 groups in a row" in str(died.value)


@pytest.mark.parametrize(("outcomes", "survives"), [("FFSFF", True), ("FFF", False)])
def test_one_success_resets_the_count_of_failures_in_a_row(outcomes, survives):
    """W3, script 4: with limit 2, F F S F F survives and F F F does not."""
    script = [Status(500) if o == "F" else Say(2) for o in outcomes]
    flags = "--rollout-batch-size 1 --n-samples-per-prompt 1 --num-rollout 2 --rollout-retry-budget 0 "
    flags += "--rollout-failure-limit 2 --async-max-concurrent-samples 1 --rollout-max-response-len 8"
    if survives:
        sim = simulate(flags, scripted(*script))
        assert sim.rollouts.status()["given_up"] == {"engine": 4}
    else:
        with pytest.raises(WorkerDied, match="3 groups in a row"):
            simulate(flags, scripted(*script))


def test_a_refused_request_is_never_repeated():
    """V3, script 5: a 400 gives the group up at once."""
    engine = scripted(Status(400, "context too long"))
    sim = simulate(SMALL + "--async-max-concurrent-samples 4", engine)
    assert sim.rollouts.status()["given_up"] == {"refused": 1}
    assert [r["rid"].split(".")[0] for r in engine.requests].count("0") == 1


@pytest.mark.parametrize("code", [502, 503, 504])
def test_gateway_errors_are_repeated_with_the_same_id(code):
    engine = scripted(Status(code), Status(code))
    sim = simulate(SMALL, engine)
    ids = Counter(r["rid"] for r in engine.requests)
    assert sum(n - 1 for n in ids.values()) == 2
    assert sim.rollouts.status()["given_up"] == {}


@pytest.mark.parametrize(
    "body",
    [
        {"text": "x", "output_ids": [1, 2], "meta_info": {"output_token_logprobs": [[-1.0, 1]]}},
        {"text": "x", "meta_info": {"output_token_logprobs": [[float("nan"), 1]]}},
        {"text": "hello", "meta_info": {"completion_tokens": 1}},
        {"text": "no meta"},
        {"text": "x", "meta_info": {"output_token_logprobs": [[-1.0, 1]], "finish_reason": "stop"}},
        {"text": "x", "meta_info": {"output_token_logprobs": [[None, 1]]}},
        {
            "text": "x",
            "meta_info": {"output_token_logprobs": [[-1.0, 1]], "weight_versions": [{"version": "1", "end": 1}]},
        },
        {"text": "x", "meta_info": {"output_token_logprobs": [-1.0]}},
    ],
    ids=[
        "unequal lengths",
        "NaN log-prob",
        "text without ids",
        "no meta_info",
        "reason",
        "no log-prob",
        "span",
        "entry",
    ],
)
def test_an_unusable_reply_spends_an_attempt_and_is_never_trained(body):
    """T1, scripts 12, 21: ids and log-probs that don't belong together are an engine's failure."""
    sim = simulate(SMALL, scripted(Raw(body)))
    assert sim.rollouts.status()["given_up"] == {}
    assert_every_prompt_is_accounted_for(sim)


@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_an_aborted_reply_is_sampled_again_from_nothing(tokens):
    """V2, Q3, scripts 6-8: with partial rollout off, nothing of the aborted attempt stays."""
    engine = scripted(Say(tokens, "abort"))
    sim = simulate(SMALL, engine)
    again = [r for r in engine.requests if r["rid"].split(".")[0] == engine.requests[0]["rid"].split(".")[0]]
    assert len(again) == 2
    assert again[1]["input_ids"] == again[0]["input_ids"]
    assert again[1]["sampling_params"]["sampling_seed"] != again[0]["sampling_params"]["sampling_seed"]
    assert_every_prompt_is_accounted_for(sim)


def test_an_aborted_reply_without_log_probs_survives_parsing():
    """V2a: never started: empty text, no ids, no log-prob field at all."""
    sim = simulate(SMALL, scripted(Raw({"text": "", "meta_info": {"finish_reason": {"type": "abort"}}})))
    assert sim.rollouts.status()["given_up"] == {}


def test_partial_rollout_asks_only_for_what_is_left():
    """V3, script 7: cap 8, aborted after 5: the next request sends the 5 and asks for 3."""
    flags = (
        "--rollout-batch-size 1 --n-samples-per-prompt 1 --num-rollout 1 --rollout-max-response-len 8 --partial-rollout"
    )
    engine = scripted(Say(5, "abort"), Say(8))
    sim = simulate(flags, engine)
    first, second = engine.requests[:2]
    assert len(second["input_ids"]) == len(first["input_ids"]) + 5
    assert second["sampling_params"]["max_new_tokens"] == 3
    (sample,) = sim.trainer.batches[0].groups[0].samples
    assert sample.response_length == 8


def test_abort_at_the_cap_needs_no_request_and_is_rewarded():
    """V3: aborted after all 8 tokens: truncated, no further request, and it still gets a reward."""
    flags = (
        "--rollout-batch-size 1 --n-samples-per-prompt 1 --num-rollout 1 --rollout-max-response-len 8 --partial-rollout"
    )
    engine = scripted(Say(8, "abort"))
    sim = simulate(flags, engine)
    (sample,) = sim.trainer.batches[0].groups[0].samples
    assert sample.status is Sample.Status.TRUNCATED
    assert sample.reward is not None
    assert len({r["rid"] for r in engine.requests if r["rid"].startswith("0.")}) == 1


def test_a_response_of_zero_tokens_is_a_response():
    """Script 11: stop at once."""
    sim = simulate(SMALL, scripted(Say(0)))
    assert_every_prompt_is_accounted_for(sim)


def test_partial_groups_train_two_survivors_and_give_up_one():
    """W13: with partial groups, a group counts as smaller; one survivor alone has no baseline."""
    lost = {"0", "4", "5", "6"}  # group 0 loses one sample of four, group 1 loses three
    hangs = lambda payload: Hang() if payload["rid"].split(".")[0] in lost else None  # noqa: E731
    flags = SMALL + "--rollout-partial-groups --rollout-sample-timeout-s 0.5 --rollout-retry-budget 0"
    sim = simulate(flags, FakeEngine(choose=hangs))
    sizes = {g.samples[0].group_index: len(g.samples) for b in sim.trainer.batches for g in b.groups}
    assert sizes[0] == 3
    assert 1 not in sizes
    assert sim.rollouts.status()["given_up"] == {"timeout": 1}


def test_siblings_of_a_given_up_sample_are_settled():
    """W13: half of a group fails; nothing of it runs on, and its slots are free."""
    engine = scripted(Status(400), Hang(), Hang(), Hang())
    sim = simulate(SMALL + "--async-max-concurrent-samples 4", engine)
    assert not engine._running
    assert sim.rollouts.status()["given_up"] == {"refused": 1}


def test_rewards_that_fail_give_the_group_up_and_are_never_zero():
    """L7, W17: every reward fails: the run stops with the cause, no batch is trained."""

    def reward(sample):
        raise RewardFailed("the grader is down")

    with pytest.raises(WorkerDied, match="the grader is down"):
        simulate(SMALL, reward=reward)


def test_a_failing_generate_hook_is_named():
    async def broken(args, sample, sampling_params):
        raise KeyError("no such tool")

    with (
        function_registry.temporary("my.generate", broken),
        pytest.raises(WorkerDied, match=r"my\.generate.*no such tool"),
    ):
        simulate(SMALL + "--custom-generate-function-path my.generate")


def test_timeouts_are_named_as_the_first_cause():
    with pytest.raises(WorkerDied, match=r"no response in 0\.5 s \(--rollout-sample-timeout-s\)"):
        simulate(SMALL + "--rollout-sample-timeout-s 0.5", FakeEngine(choose=lambda p: Hang()))


@pytest.mark.parametrize("handler", ["retry", "drop"])
def test_a_sample_is_never_started_more_often_than_its_budget_allows(handler):
    """Attempts count per sample, whatever spent them: an engine's failure, an abort, or growing too old."""
    mostly_bad = lambda p: (Status(500), Say(2, "abort"), None)[int(p["sampling_params"]["sampling_seed"]) % 3]  # noqa: E731
    engine = FakeEngine(choose=mostly_bad, length=LONG_TAIL, token_s=0.2)
    flags = (
        SMALL.replace("--num-rollout 3", "--num-rollout 12") + "--max-weight-staleness 1 --rollout-failure-limit 1000 "
    )
    sim = simulate(flags + f"--async-unused-samples-handler {handler}", engine, FakeEngine(length=LONG_TAIL))
    requests = {r["rid"] for e in sim.engines.values() for r in e.requests}
    starts = Counter(rid.split(".")[0] for rid in requests)
    assert max(starts.values()) <= 3
    assert_every_prompt_is_accounted_for(sim)


def test_tokens_of_failed_attempts_are_wasted_tokens():
    sim = simulate(SMALL, scripted(Say(7, "abort"), Say(5, "abort")))
    assert sim.rollouts.status()["wasted_tokens"] == 12


def siblings(given):
    """A generate hook that answers each sample with two compact siblings, built anew."""
    made = [Sample(tokens=[1, 2, 3], response_length=1, rollout_log_probs=[-0.5]) for _ in range(2)]
    for part in made:
        part.rollout_id = given.sample.index
    return made


def test_siblings_that_a_hook_builds_itself_are_fresh_and_can_be_retried():
    async def generate(input):
        await asyncio.sleep(3 if input.sample.group_index == 3 else 0.1)
        return siblings(input)

    with function_registry.temporary("my.generate", generate):
        flags = SMALL.replace("--num-rollout 3", "--num-rollout 9") + "--custom-generate-function-path my.generate "
        sim = simulate(flags + "--max-weight-staleness 1 --async-unused-samples-handler retry")
    samples = [s for b in sim.trainer.batches for g in b.groups for s in iter_samples(g.samples)]
    assert len(samples) == 9 * 2 * 4 * 2
    assert all(s.submit_version is not None and s.group_index is not None for s in samples)
    assert all(isinstance(s, Sample) for group in sim.rollouts.open_prompts() for s in group)


def test_a_samples_own_generate_function_wins():
    async def own(input):
        input.sample.append_response([9], [-0.1], [])
        input.sample.status = Sample.Status.COMPLETED
        return input.sample

    class Source(CountingSource):
        def _group(self):
            group = super()._group()
            for sample in group:
                sample.generate_function_path = "my.own" if sample.group_index % 2 else None
            return group

    with function_registry.temporary("my.own", own):
        sim = simulate(SMALL + "--max-weight-staleness 0", source=Source(4))
    for batch in sim.trainer.batches:
        for group in batch.groups:
            assert (group.samples[0].tokens == [9]) == bool(group.samples[0].group_index % 2)


def test_a_prompt_that_leaves_no_room_is_truncated_not_fatal():
    sim = simulate(SMALL + "--rollout-max-context-len 1", FakeEngine())
    samples = [s for b in sim.trainer.batches for g in b.groups for s in iter_samples(g.samples)]
    assert {s.status for s in samples} == {Sample.Status.TRUNCATED}
    assert all(s.rollout_log_probs == [] for s in samples)


def test_nothing_starts_before_the_first_weights():
    """Samples are submitted at version 1 or later, never at a version before any generation."""
    sim = simulation(SMALL + "--max-weight-staleness 2", FakeEngine(tells_spans=False))
    sim.trainer.write_s = 5.0
    clock.run(sim.run())
    samples = [s for b in sim.trainer.batches for g in b.groups for s in iter_samples(g.samples)]
    assert min(s.submit_version for s in samples) == 1
    assert sim.rollouts.status()["given_up"] == {}


@pytest.mark.parametrize("returned", [None, [], "text", [None]])
def test_a_generate_hook_that_returns_no_sample_is_named(returned):
    async def forgets(args, sample, sampling_params):
        return returned

    with (
        function_registry.temporary("my.generate", forgets),
        pytest.raises(WorkerDied, match=r"my\.generate returned .* works"),
    ):
        simulate(SMALL + "--custom-generate-function-path my.generate")


# ---- engines


def test_without_any_engine_the_run_ends_within_its_limit():
    dead = FakeEngine(dead=True)
    with pytest.raises(WorkerDied, match="no engine was in the routing for 300 s"):
        simulate(SMALL, dead)


def test_a_killed_engine_costs_nothing_and_serves_again_only_with_current_weights():
    first, second = FakeEngine(length=LONG_TAIL), FakeEngine(length=LONG_TAIL)
    sim = simulation(SMALL.replace("--num-rollout 3", "--num-rollout 8"), first, second)

    async def main():
        loop = asyncio.get_running_loop()
        loop.call_later(0.3, first.kill)
        loop.call_later(1.0, first.revive)
        await sim.run()

    clock.run(main())
    assert sim.rollouts.status()["given_up"] == {}
    assert_every_prompt_is_accounted_for(sim)
    back = first.calls.index("/model_info", first.calls.index("/generate"))
    after = first.calls[back:]
    assert after.index("/update_weights_from_shared_memory") < after.index("/generate")
    assert first.version == second.version == str(sim.rollouts.version)


def test_refused_connections_after_an_update_lose_no_group():
    """V6, script 16."""
    sim = simulate(SMALL, FakeEngine(refuse_after_update_s=2.0))
    assert sim.rollouts.status()["given_up"] == {}
    assert_every_prompt_is_accounted_for(sim)


def test_health_is_asked_again_until_it_is_good():
    """Script 17: 503, 503, 200."""
    sim = simulate(SMALL, FakeEngine(health=deque([503, 503, 200])))
    assert len(sim.trainer.batches) == 3


# ---- versions


@pytest.mark.parametrize("tells_spans", [True, False])
def test_an_update_in_the_middle_never_makes_a_sample_newer(tells_spans):
    """S6, script 14: submitted at 1, updated to 2 while it runs."""
    engine = FakeEngine(length=lambda p, r: 40, token_s=0.05, tells_spans=tells_spans)
    sim = simulate(SMALL + "--async-max-concurrent-samples 16", engine)
    samples = [s for b in sim.trainer.batches for g in b.groups for s in iter_samples(g.samples)]
    crossed = [s for s in samples if len(s.version_spans) > 1]
    assert all(s.oldest_version == s.submit_version for s in samples)
    assert bool(crossed) == tells_spans
    for s in crossed:
        assert s.weight_versions == [str(v.version) for v in s.version_spans]
        assert s.version_spans[0].start == 0 and s.version_spans[-1].end == s.response_length


@pytest.mark.parametrize(("label", "version"), [("default", 4), ("", 4), (None, 4), ("7", 4), (7, 4), ("3", 3)])
def test_labels_that_say_nothing_leave_the_submit_version(label, version):
    """S7, script 13: and a label read when the reply was built never makes tokens newer than their submission."""
    meta = {"output_token_logprobs": [[-1.0, 5]], "weight_version": label}
    (span,) = parse_generation({"text": "x", "meta_info": meta}, submit_version=4).spans
    assert span == (version, 0, 1)


@pytest.mark.parametrize("handler", ["drop", "retry"])
def test_a_slow_prompt_is_trained_or_given_up_with_a_count(handler):
    """S3, script 20: one prompt in ten takes far longer than the bound; it never blocks the run."""
    slow = lambda payload, rng: 60 if payload["input_ids"] == [ord("3")] else 1  # noqa: E731
    flags = "--rollout-batch-size 2 --n-samples-per-prompt 1 --num-rollout 60 --max-weight-staleness 2 "
    flags += f"--rollout-max-response-len 64 --async-unused-samples-handler {handler} --async-max-concurrent-samples 6"
    engine = FakeEngine(length=slow, token_s=0.1)
    sim = simulate(flags, engine)
    assert sim.rollouts.status()["given_up"] == {"stale": 1}
    asked = [r for r in engine.requests if r["input_ids"] == [ord("3")]]
    assert len(asked) == (1 if handler == "drop" else 3)
    assert max(sim.trainer.ages()) <= 2
    assert_every_prompt_is_accounted_for(sim)


def test_sampling_seeds_depend_on_run_sample_and_attempt_alone():
    seeds = {sampling_seed(r, i, a) for r in range(3) for i in range(50) for a in range(3)}
    assert len(seeds) == 450
    assert sampling_seed(1, 2, 0) == sampling_seed(1, 2, 0)
    assert all(0 <= s < 2**31 for s in seeds)


# ---- filters, evaluation, user's rollout functions


def test_filtered_groups_are_replaced_and_their_credit_is_free_at_once():
    def keep_even(args, group):
        return DynamicFilterOutput(group[0].group_index % 2 == 0, "odd")

    with function_registry.temporary("my.filter", keep_even):
        sim = simulate(SMALL + "--max-weight-staleness 0 --dynamic-sampling-filter-path my.filter")
    assert trained_prompts(sim) == [0, 2, 4, 6, 8, 10]
    assert set(sim.rollouts.status()["given_up"]) == {"filtered_odd"}
    assert_every_prompt_is_accounted_for(sim)


def eval_set(prompts, samples):
    groups = [[Sample(index=-1 - i * samples - j, prompt=f"e{i}") for j in range(samples)] for i in range(prompts)]
    return EvalSet("held_out", groups)


def test_every_evaluation_is_complete_of_one_version_and_the_last_always_runs():
    """E1, E2: 16 prompts x 8 on 4 slots, every 2 of 4 steps, while training samples run."""
    flags = (
        "--rollout-batch-size 2 --n-samples-per-prompt 2 --num-rollout 4 --eval-interval 2 --eval-max-response-len 6"
    )
    engine = FakeEngine(length=lambda p, r: 5)
    sim = simulate(flags + " --rollout-max-response-len 6", engine, eval_sets=[eval_set(16, 8)])
    assert list(sim.record.evaluations) == [0, 2, 4]
    versions = [m["eval/weight_version"] for m in sim.record.evaluations.values()]
    for version, result in zip(versions, sim.direct.evaluations, strict=True):
        samples = result.data["held_out"]["samples"]
        assert len(samples) == 128
        assert {span.version for s in samples for span in s.version_spans} == {version}
    assert all(p is not None and p >= 0 for p in trained_prompts(sim))


def test_no_training_group_starts_during_an_evaluation():
    flags = "--rollout-batch-size 2 --n-samples-per-prompt 2 --num-rollout 4 --eval-interval 1 --rollout-max-response-len 64"
    engine = FakeEngine(length=lambda p, r: 30)
    sim = simulate(flags, engine, eval_sets=[eval_set(8, 1)])
    order = "".join("e" if r["rid"].startswith("-") else "t" for r in engine.requests)
    blocks = re.findall("e+", order)
    assert sum(map(len, blocks)) == 8 * 5
    assert all(len(block) % 8 == 0 for block in blocks)
    assert len(sim.trainer.batches) == 4


def test_a_users_rollout_function_is_called_one_step_ahead_with_its_version():
    seen = []

    class Mine:
        def __init__(self, given):
            self.source = given.data_source

        async def __call__(self, given):
            seen.append((given.rollout_id, given.weight_version))
            groups = self.source.get_samples(2)
            for s in [s for group in groups for s in group]:
                s.tokens, s.response_length, s.rollout_log_probs, s.reward = [1, 2], 1, [-0.5], 1.0
                s.weight_versions = [str(given.weight_version)]
            return groups

    with function_registry.temporary("my.rollout", Mine):
        flags = "--rollout-batch-size 2 --n-samples-per-prompt 2 --num-rollout 3 --update-weights-interval 2 "
        sim = simulate(flags + "--one-step-off --rollout-function-path my.rollout")
    assert seen == [(0, 1), (1, 1), (2, 2)]
    assert [b.version for b in sim.trainer.batches] == [1, 1, 2]


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ([[Sample()]], "returned 1 groups"),
        ({"a": 1}, "no list of groups"),
        ([Sample()], "no list of groups"),
        ([], "0 groups"),
    ],
)
def test_a_rollout_function_that_returns_something_else_is_named(returned, words):
    async def mine(args, rollout_id, data_source):
        return returned

    with function_registry.temporary("my.rollout", mine), pytest.raises(HookError, match=rf"my\.rollout.*{words}"):
        flags = "--rollout-batch-size 2 --n-samples-per-prompt 1 --num-rollout 1 --one-step-off "
        simulate(flags + "--rollout-function-path my.rollout")


def test_what_the_call_ahead_has_drawn_is_open_at_a_checkpoint():
    """K1, K2: the prefetched prompts are neither trained nor lost."""
    open_at_save = []

    async def mine(args, rollout_id, data_source):
        groups = data_source.get_samples(2)
        for s in iter_samples(groups):
            s.append_response([1], [-0.5], [])
            s.reward, s.submit_version = 1.0, 1
        return groups

    class Trainer(FakeTrainer):
        async def save(self, step, folder):
            await asyncio.sleep(1)
            open_at_save.append([g[0].group_index for g in sim.rollouts.open_prompts()])

    with function_registry.temporary("my.rollout", mine):
        flags = "--rollout-batch-size 2 --n-samples-per-prompt 1 --num-rollout 2 --save-interval 1 --one-step-off "
        sim = simulation(flags + "--rollout-function-path my.rollout", trainer=Trainer())
        clock.run(sim.run())
    assert open_at_save == [[2, 3], []]


def test_the_same_seed_gives_the_same_run():
    def ids(sim):
        return [
            (s.index, s.tokens, s.weight_versions) for b in sim.trainer.batches for g in b.groups for s in g.samples
        ]

    runs = [simulate(SMALL, FakeEngine(length=LONG_TAIL), FakeEngine(length=LONG_TAIL)) for _ in range(2)]
    assert ids(runs[0]) == ids(runs[1])
    assert URLS[0] in runs[0].engines


def test_a_filter_that_rejects_everything_stops_the_run_with_its_reasons():
    """It would reject for ever; one that keeps a group now and then goes on as long as it likes."""
    seen = []

    def keep(args, group):
        seen.append(group)
        return DynamicFilterOutput(False, "odd" if len(seen) % 4 else "even")

    with (
        function_registry.temporary("user.keep", keep),
        pytest.raises(WorkerDied, match=r"rejected 1000 groups in a row \(filtered_odd 750, filtered_even 250\)"),
    ):
        simulate(SMALL + "--dynamic-sampling-filter-path user.keep")
    assert len(seen) == 1000
    with function_registry.temporary("user.keep", lambda args, group: seen.append(group) or len(seen) % 300 == 0):
        sim = simulate(SMALL + "--dynamic-sampling-filter-path user.keep", FakeEngine(token_s=0.0001))
    assert_every_prompt_is_accounted_for(sim)
    assert sim.rollouts.status()["given_up"]["filtered"] > 1000
