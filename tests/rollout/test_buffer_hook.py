"""A user's data buffer in a fully-async run: whatever it does, groups are trained once, fresh, and accounted for."""

import asyncio
import re
from argparse import Namespace

import pytest

from miles.engine.fake import FakeEngine
from miles.errors import HookError
from miles.hooks import function_registry
from miles.rollout.fully_async_data_buffer import (
    DataBuffer,
    DataBufferConstructorInput,
    DataBufferInput,
    DefaultDataBuffer,
    group_oldest_weight_version,
)
from miles.sim import clock
from miles.types import Sample, VersionSpan, first_sample
from tests.virtual import assert_every_prompt_is_accounted_for, simulation, trained_prompts

FLAGS = (
    "--rollout-batch-size 4 --n-samples-per-prompt 2 --num-rollout 12 --rollout-max-response-len 64 "
    "--async-max-concurrent-samples 24 --custom-async-data-buffer-path user.Buffer "
)
LONG_TAIL = lambda payload, rng: 1 + int(60 * rng.random() ** 4)  # noqa: E731
UNTIL_S = 3600


class Recording(DataBuffer):
    """Newest first, and remembers what it was given and asked."""

    made: list = []  # noqa: RUF012  (the run constructs it; tests look at it here)

    def __init__(self, input):
        self.input, self.groups, self.asked, self.puts = input, [], [], 0
        self.arrived = asyncio.Condition()
        Recording.made.append(self)

    async def put(self, input):
        async with self.arrived:
            self.puts += 1
            self.groups.append(input)
            self.arrived.notify_all()

    async def get(self, **context):
        self.asked.append(context["current_version"])
        async with self.arrived:
            await self.arrived.wait_for(lambda: self.groups)
            return self.choose(context["current_version"])

    def choose(self, version):
        return self.groups.pop().group

    def get_metrics(self):
        return {"queue_size": -1, "newest": self.puts, "user/waits": 2}


def run(made, flags="", *engines, reward=None):
    sim = simulation(FLAGS + flags, *(engines or (FakeEngine(length=LONG_TAIL, token_s=0.05),)))

    async def main():
        async with asyncio.timeout(UNTIL_S):
            await sim.run()

    with function_registry.temporary("user.Buffer", made):
        clock.run(main())
    return sim


def test_a_buffer_gives_the_batches_and_is_asked_at_the_version_of_their_step():
    sim = run(Recording, "--max-weight-staleness 2")
    buffer = Recording.made[-1]
    assert len(sim.trainer.batches) == 12 and all(len(b.groups) == 4 for b in sim.trainer.batches)
    assert buffer.asked == sorted(buffer.asked) and set(buffer.asked) == {b.version for b in sim.trainer.batches}
    assert max(sim.trainer.ages()) <= 2
    assert_every_prompt_is_accounted_for(sim)
    assert sim.record.steps[3]["rollout/fully_async/newest"] > 0
    assert sim.record.steps[3]["user/waits"] == 2.0


def test_the_shipped_buffer_is_first_in_first_out():
    order = []

    class Fifo(DefaultDataBuffer):
        async def put(self, input):
            await super().put(input)
            order.append(first_sample(input.group).group_index)

    sim = run(Fifo, "--async-data-buffer-capacity-factor 8")
    taken = [{first_sample(g.samples).group_index for g in b.groups} for b in sim.trainer.batches]
    assert taken == [set(order[i : i + 4]) for i in range(0, 48, 4)]
    assert_every_prompt_is_accounted_for(sim)


@pytest.mark.parametrize("handler", ["drop", "retry"])
def test_what_comes_out_too_old_is_never_trained(handler):
    """The hook gives stale groups as long as it has some: each is handed on and counted, the step gets fresh ones."""

    class Oldest(Recording):
        def choose(self, version):
            oldest = min(self.groups, key=lambda i: group_oldest_weight_version(i.group))
            self.groups.remove(oldest)
            return oldest.group

    flags = f"--max-weight-staleness 1 --async-data-buffer-capacity-factor 8 --async-unused-samples-handler {handler}"
    slow = lambda payload, rng: 400 if payload["rid"].startswith("5.") else 2  # noqa: E731
    sim = run(Oldest, flags + " --rollout-max-response-len 500", FakeEngine(length=slow, token_s=0.05))
    assert max(sim.trainer.ages()) <= 1
    assert_every_prompt_is_accounted_for(sim)
    given_up = sim.rollouts.status()["given_up"]
    assert given_up.get("stale", 0) >= 1 or (handler == "retry" and 5 // 2 in trained_prompts(sim))


@pytest.mark.parametrize("handler", ["drop", "retry"])
def test_what_the_hook_hands_on_is_counted_once(handler):
    class HandsOn(Recording):
        async def put(self, input):
            if self.puts % 5 == 4:
                self.puts += 1
                self.input.unused_handler_fn(input.group)
            else:
                await super().put(input)

    sim = run(HandsOn, f"--async-unused-samples-handler {handler}")
    assert_every_prompt_is_accounted_for(sim)
    assert (sim.rollouts.status()["given_up"].get("unused", 0) > 0) is (handler == "drop")


def test_a_put_that_waits_holds_back_only_its_own_group_and_admission_still_bounds():
    class Slow(Recording):
        async def put(self, input):
            if first_sample(input.group).group_index == 1:
                await asyncio.sleep(20)
            await super().put(input)

    sim = run(Slow, "--max-weight-staleness 40")
    assert 1 not in trained_prompts(sim)[:4]
    assert_every_prompt_is_accounted_for(sim)
    assert sim.issued <= 12 * 4


def test_a_put_that_never_returns_stops_starts_at_the_bounds():
    class Stuck(Recording):
        async def put(self, input):
            await asyncio.Event().wait()

    sim = simulation(FLAGS)

    async def main():
        async with asyncio.timeout(UNTIL_S):
            await sim.run()

    with function_registry.temporary("user.Buffer", Stuck), pytest.raises(TimeoutError):
        clock.run(main())
    assert sim.issued <= 8 + 12


class Twice(Recording):
    def choose(self, version):
        return self.groups[0].group


class Foreign(Recording):
    def choose(self, version):
        return [Sample(index=99), Sample(index=100)]


class Mixed(Recording):
    def choose(self, version):
        return [s for i in self.groups for s in i.group] if len(self.groups) > 1 else self.groups.pop().group


class Nothing(Recording):
    def choose(self, version):
        return None


class Raises(Recording):
    def choose(self, version):
        return self.groups["first"]


class RaisesInPut(Recording):
    async def put(self, input):
        raise KeyError("no room")


class HandsOnTwice(Recording):
    async def put(self, input):
        self.input.unused_handler_fn(input)
        self.input.unused_handler_fn(input)


class WordMetrics(Recording):
    def get_metrics(self):
        return {"depth": "deep"}


class FailsToStart(Recording):
    def __init__(self, input):
        raise RuntimeError("no disk")


@pytest.mark.parametrize(("made", "said"), [
    (Twice, r"get gave the group of sample \d+ twice: it had left the buffer before"),
    (Foreign, "get gave the group of sample 99, which never was put"),
    (Mixed, "which mixes groups or holds a sample twice"),
    (Nothing, r"get gave None; a group \(a list of Sample\) that was put works"),
    (Raises, r"user.Buffer: get failed on a batch of version 1: TypeError: .*test_buffer_hook.py:\d+\)"),
    (RaisesInPut, r"user.Buffer: put failed on the group of sample \d+: KeyError: 'no room' \(.*test_buffer_hook.py:\d+\)"),
    (HandsOnTwice, r"unused_handler_fn got the group of sample \d+ twice|which never was put, or was trained or given up"),
    (WordMetrics, "get_metrics gave 'deep' for 'depth'; a number works"),
    (FailsToStart, r"user.Buffer failed on its construction: RuntimeError: no disk \(.*test_buffer_hook.py:\d+\)"),
])  # fmt: skip
def test_a_hook_that_breaks_the_rules_is_named(made, said):
    with pytest.raises(Exception) as caught:
        run(made)
    error = caught.value
    assert isinstance(error if isinstance(error, HookError) else error.__cause__, HookError)
    assert re.search(said, str(error)), error


def test_a_cancelled_take_loses_no_group():
    """What the first take drew before it was cancelled, the second one gets."""
    sim = simulation(FLAGS)

    async def main():
        rollouts = sim.build()
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(rollouts.run())
            await rollouts.publish(await sim.trainer.write_weights(1, frozenset()), 1)
            buffer = Recording.made[-1]
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.001):
                    await rollouts.take_batch(0)
            batch = await rollouts.take_batch(0)
            rollouts.close()
            await running
        return batch, buffer

    with function_registry.temporary("user.Buffer", Recording):
        batch, buffer = clock.run(main())
    assert len(buffer.asked) == len({g.issue_id for g in batch.groups}) == 4


def test_whoever_waits_for_a_batch_learns_what_the_hook_did():
    """Without a ring around it too, as the first era's functions call it."""
    sim = simulation(FLAGS)

    async def main():
        rollouts = sim.build()
        running = asyncio.create_task(rollouts.run())
        await rollouts.publish(await sim.trainer.write_weights(1, frozenset()), 1)
        with pytest.raises(HookError, match="get gave None"):
            await rollouts.take_batch(0)
        with pytest.raises(HookError, match="get gave None"):
            await running

    with function_registry.temporary("user.Buffer", Nothing):
        clock.run(main())


def fresh(version, status=Sample.Status.COMPLETED):
    spans = [VersionSpan(version, 0, 1)]
    return DataBufferInput([], [Sample(tokens=[1], response_length=1, version_spans=spans, status=status)])


def test_the_shipped_buffer_by_itself():
    """Usable without a run: full it holds `put` back; what is aborted or too old goes to the handler."""
    unused = []
    args = Namespace(async_data_buffer_capacity_factor=1.0, rollout_batch_size=2, max_weight_staleness=1)
    buffer = DefaultDataBuffer(DataBufferConstructorInput(args, unused.append))
    old, new, more = fresh(1), fresh(4), fresh(5)

    async def main():
        await buffer.put(fresh(4, Sample.Status.ABORTED))
        await buffer.put(old)
        await buffer.put(new)
        third = asyncio.create_task(buffer.put(more))
        await asyncio.sleep(1)
        assert not third.done() and len(buffer) == 2
        assert await buffer.get(current_version=5) is new.group
        await third
        assert await buffer.get(current_version=None) is more.group

    clock.run(main())
    assert unused[1:] == [old] and len(unused) == 2
    assert buffer.get_metrics() == {"queue_size": 0, "aborted_groups_filtered": 1, "stale_groups_filtered": 1}
