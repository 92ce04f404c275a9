"""The virtual clock: time jumps, and nothing real can happen."""

import asyncio
import time

import pytest

from miles.errors import Stalled
from miles.sim import clock


def test_a_thousand_hours_take_no_time():
    async def main():
        await asyncio.sleep(3_600_000)
        return asyncio.get_running_loop().time()

    assert clock.run(main()) == 3_600_000


def test_timers_fire_in_order():
    async def main():
        fired = []

        async def after(delay):
            await asyncio.sleep(delay)
            fired.append((delay, asyncio.get_running_loop().time()))

        await asyncio.gather(*(after(d) for d in (3, 1, 2)))
        return fired

    assert clock.run(main()) == [(1, 1), (2, 2), (3, 3)]


def test_waiting_for_ever_is_an_error_that_names_who_waits():
    async def main():
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(asyncio.Event().wait(), name="the-lost-one")

    with pytest.raises(Stalled, match="the-lost-one"):
        clock.run(main())


def test_threads_and_sockets_are_refused():
    async def thread():
        await asyncio.to_thread(time.monotonic)

    async def socket():
        await asyncio.open_connection("127.0.0.1", 9)

    with pytest.raises(RuntimeError, match="threads"):
        clock.run(thread())
    with pytest.raises(RuntimeError, match="sockets"):
        clock.run(socket())
