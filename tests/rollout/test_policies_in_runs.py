"""Each staleness policy under the faults that runs meet, on the virtual clock."""

from collections import deque

import pytest

from miles.engine.fake import FakeEngine, Hang, Raw, Reset, Say, Status
from miles.errors import WorkerDied
from miles.rollout.evaluation import EvalSet
from miles.types import Sample
from tests.virtual import assert_every_prompt_is_accounted_for, simulate, trained_prompts

LONG_TAIL = lambda payload, rng: 1 + int(60 * rng.random() ** 4)  # noqa: E731
POLICIES = ["evict", "wait", "mask"]


def flags_of(policy, bound, *, batch=4, steps=20, interval=1, more=""):
    return (
        f"--rollout-batch-size {batch} --n-samples-per-prompt 2 --num-rollout {steps} --rollout-max-response-len 64 "
        f"--staleness-policy {policy} --max-weight-staleness {bound} --update-weights-interval {interval} "
        f"--async-max-concurrent-samples {10 * batch} {more}"
    )


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("bound", [0, 1, 2, 4, 8])
@pytest.mark.parametrize("interval", [1, 3])
@pytest.mark.parametrize("more", ["", "--partial-rollout --num-steps-per-rollout 2"])
def test_no_trained_token_is_older_than_the_bound(policy, bound, interval, more):
    engines = [
        FakeEngine(length=LONG_TAIL, token_s=s, script=deque([Say(5, "abort"), Status(500)])) for s in (0.1, 0.02)
    ]
    sim = simulate(flags_of(policy, bound, interval=interval, more=more), *engines)
    status = sim.rollouts.status()
    assert [len(b.groups) for b in sim.trainer.batches] == [4] * 20
    assert max(sim.trainer.ages()) <= bound
    assert_every_prompt_is_accounted_for(sim)
    if policy == "wait":
        assert "stale" not in status["given_up"]
    if policy != "mask":
        assert status["masked_tokens"] == 0


def straggling(policy, **engine):
    """One prompt in ten takes far longer than K steps."""
    slow = lambda payload, rng: 60 if payload["input_ids"] == [ord("3")] else 1  # noqa: E731
    flags = flags_of(policy, 2, batch=2, steps=22)
    return simulate(flags, FakeEngine(length=slow, token_s=0.1, **engine))


def test_a_straggler_is_dropped_waited_for_or_trained_in_part():
    """S3, script 20, and the meters of each policy: what it costs is counted."""
    evict, wait, mask = (straggling(p) for p in POLICIES)
    assert 3 not in trained_prompts(evict) and evict.rollouts.status()["given_up"] == {"stale": 1}
    assert evict.rollouts.status()["wasted_tokens"] == 120
    assert 3 in trained_prompts(wait) and 3 in trained_prompts(mask)
    waits = lambda sim: max(s["perf/train_wait_time"] for s in sim.record.steps.values())  # noqa: E731
    assert waits(wait) > 4 > waits(mask)
    status = mask.rollouts.status()
    assert 0 < status["masked_tokens"] < 120 and status["wasted_tokens"] == 0
    assert status["masked_length_bias"] < status["length_bias"]


def test_masked_tokens_never_reach_the_trainer_and_the_rewards_stay():
    sim = straggling("mask")
    (batch, group) = next((b, g) for b in sim.trainer.batches for g in b.groups if g.samples[0].group_index == 3)
    for sample in group.samples:
        ages = [batch.version - v for v, start, end in sample.version_spans for _ in range(start, end)]
        assert sample.loss_mask == [int(age <= 2) for age in ages]
        assert 0 in sample.loss_mask and sample.reward is not None


def test_mask_evicts_a_group_with_nothing_left():
    """S4: an engine that tells no spans leaves the submit version to all tokens of the straggler, so none is fresh."""
    sim = straggling("mask", tells_spans=False)
    assert sim.rollouts.status()["given_up"] == {"stale": 1}
    assert sim.rollouts.status()["masked_tokens"] == 0
    assert max(sim.trainer.ages()) <= 2


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "script",
    [
        [Say(3), Say(3), Say(3), Reset()],
        [Hang()],
        [Status(500), Status(500), Say(2)],
        [Status(400, "context too long")],
        [Raw({"text": "", "meta_info": {"finish_reason": {"type": "abort"}}})],
        [Say(5, "abort"), Say(8)],
        [Say(1, "abort")],
        [Say(0)],
        [Raw({"text": "x", "output_ids": [1, 2], "meta_info": {"output_token_logprobs": [[-1.0, 1]]}})],
        [Raw({"text": "x", "meta_info": {"output_token_logprobs": [[float("nan"), 1]]}})],
        [Status(502), Status(503), Status(504)],
    ],
    ids=["1", "2", "4", "5", "6", "7", "8", "11", "12", "21", "18"],
)
def test_every_script_ends_with_each_prompt_accounted_for(policy, script):
    """The numbers are those of the list of reply scripts."""
    sim = simulate(flags_of(policy, 1, steps=4, more="--rollout-sample-timeout-s 5"), FakeEngine(script=deque(script)))
    assert len(sim.trainer.batches) == 4
    assert max(sim.trainer.ages()) <= 1
    assert_every_prompt_is_accounted_for(sim)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "engine",
    [
        dict(version="default", tells_spans=False),
        dict(refuse_after_update_s=2.0),
        dict(health=deque([503, 503, 200])),
        dict(aborts_on_version=True),
        dict(saturation=2.0, prefill_s=0.05),
    ],
    ids=["13", "16", "17", "15", "shared and recomputed"],
)
def test_engines_of_every_kind_lose_nothing(policy, engine):
    made = {k: deque(v) if isinstance(v, deque) else v for k, v in engine.items()}
    sim = simulate(flags_of(policy, 1, steps=6), FakeEngine(length=LONG_TAIL, **made))
    assert sim.rollouts.status()["given_up"].keys() <= {"stale"}
    assert max(sim.trainer.ages()) <= 1
    assert_every_prompt_is_accounted_for(sim)


@pytest.mark.parametrize("policy", POLICIES)
def test_an_engine_that_only_fails_stops_the_run_with_its_words(policy):
    """W3: also where the trainer waits for a group to be on time."""
    with pytest.raises(WorkerDied, match="out of memory"):
        engine = FakeEngine(choose=lambda p: Status(500, "out of memory"))
        simulate(flags_of(policy, 1, more="--rollout-failure-limit 3"), engine)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_straggler_that_is_given_up_lets_the_trainer_go_on(policy):
    """W2, W4: the group that the step waits for never answers; its time limit ends the wait."""
    hangs = lambda payload: Hang() if payload["rid"].startswith("0.") else None  # noqa: E731
    flags = flags_of(policy, 1, steps=6, more="--rollout-sample-timeout-s 9 --rollout-retry-budget 0")
    sim = simulate(flags, FakeEngine(choose=hangs))
    assert sim.rollouts.status()["given_up"] == {"timeout": 1}
    assert len(sim.trainer.batches) == 6


@pytest.mark.parametrize("policy", POLICIES)
def test_evaluations_are_whole_and_of_one_version(policy):
    """E1, E2."""
    held_out = EvalSet("held_out", [[Sample(index=-1 - i, prompt=f"e{i}")] for i in range(16)])
    flags = flags_of(policy, 1, steps=4, more="--eval-interval 2 --eval-max-response-len 6")
    sim = simulate(flags, FakeEngine(length=LONG_TAIL), eval_sets=[held_out])
    assert list(sim.record.evaluations) == [0, 2, 4]
    for metrics, result in zip(sim.record.evaluations.values(), sim.direct.evaluations, strict=True):
        spans = {s.version for x in result.data["held_out"]["samples"] for s in x.version_spans}
        assert spans == {metrics["eval/weight_version"]}
