"""The buffer between the slots and the drain."""

import asyncio

import pytest

from miles.errors import BufferClosed, WorkerDied
from miles.rollout.data_buffer import DataBuffer
from miles.sim import clock
from miles.types import FinishedGroup


def group(issue_id, oldest, newest=None):
    return FinishedGroup(issue_id, [], oldest, oldest if newest is None else newest)


def test_groups_leave_oldest_first_whatever_order_they_finished_in():
    """Q1: versions [3,5], [3,3], [4,4] leave as [3,3], [3,5], [4,4]."""
    buffer = DataBuffer()
    for g in (group(0, 3, 5), group(1, 3, 3), group(2, 4, 4)):
        buffer.put(g)
    assert [g.issue_id for g in buffer.take(3)] == [1, 0, 2]


def test_ties_leave_in_issue_order():
    buffer = DataBuffer()
    for issue_id in (5, 2, 9):
        buffer.put(group(issue_id, 1))
    assert [g.issue_id for g in buffer.take(3)] == [2, 5, 9]


def test_what_a_take_leaves_is_there_for_the_next():
    """W1: ten complete groups, eight asked for, then two: the second take gets exactly the two left over."""
    buffer = DataBuffer()
    for issue_id in range(10):
        buffer.put(group(issue_id, 1))
    assert len(buffer.take(8)) == 8
    assert [g.issue_id for g in buffer.take(2)] == [8, 9]


def test_putting_never_waits_so_the_loop_stays_responsive():
    """W1: five completions into a buffer nobody drains; a heartbeat on the same loop still answers."""

    async def main():
        buffer, beats = DataBuffer(), 0

        async def heartbeat():
            nonlocal beats
            for _ in range(3):
                await asyncio.sleep(1)
                beats += 1

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(heartbeat())
            for issue_id in range(5):
                buffer.put(group(issue_id, 1))
        return beats

    assert clock.run(main()) == 3


def test_cancelled_wait_loses_no_group():
    async def main():
        buffer = DataBuffer()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await buffer.wait_for(2)
        buffer.put(group(0, 1))
        buffer.put(group(1, 1))
        await buffer.wait_for(2)
        return len(buffer.take(2))

    assert clock.run(main()) == 2


def test_whoever_waits_learns_why_the_buffer_closed():
    async def main():
        buffer = DataBuffer()
        asyncio.get_running_loop().call_later(5, buffer.close, WorkerDied("the engine is gone"))
        await buffer.wait_for(1)

    with pytest.raises(WorkerDied, match="the engine is gone"):
        clock.run(main())


def test_closing_twice_keeps_the_first_cause_and_puts_are_refused():
    buffer = DataBuffer()
    buffer.close()
    buffer.close(WorkerDied("later"))
    with pytest.raises(BufferClosed):
        buffer.put(group(0, 1))


def test_removing_takes_only_what_matches():
    buffer = DataBuffer()
    for issue_id, version in enumerate((1, 5, 2, 6)):
        buffer.put(group(issue_id, version))
    assert [g.issue_id for g in buffer.remove_if(lambda g: g.oldest_version < 3)] == [0, 2]
    assert [g.issue_id for g in buffer.take(9)] == [1, 3]
