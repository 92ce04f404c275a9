"""One event loop per process, and waiting for changes."""

import asyncio
import threading

import pytest

from miles import loops
from miles.loops import Changes
from miles.sim import clock


@pytest.fixture
def own_loop():
    loops.stop()
    yield
    loops.stop()


def test_state_made_on_the_loop_works_from_every_thread(own_loop):
    """W8: a contended lock made in one thread's call is used in another's; nothing is bound to two loops."""
    semaphore = asyncio.Semaphore(1)

    async def contend():
        async def hold():
            async with semaphore:
                await asyncio.sleep(0)

        await asyncio.gather(hold(), hold(), hold())
        return asyncio.get_running_loop()

    seen = [loops.run(contend())]
    thread = threading.Thread(target=lambda: seen.append(loops.run(contend())))
    thread.start()
    thread.join()
    assert seen[0] is seen[1]


def test_waiting_on_the_loop_for_itself_is_refused(own_loop):
    async def inner():
        return 1

    async def outer():
        return loops.run(inner())

    with pytest.raises(RuntimeError, match="await the coroutine"):
        loops.run(outer())


def test_an_adopted_loop_is_used_and_left_alone(own_loop):
    async def main():
        loops.adopt(asyncio.get_running_loop())

        async def where():
            return asyncio.get_running_loop()

        return await asyncio.to_thread(loops.run, where()) is asyncio.get_running_loop()

    assert asyncio.run(main())
    loops.stop()


def test_every_waiter_looks_at_its_own_condition():
    async def main():
        changes, state, woken = Changes(), {"n": 0}, []

        async def wait_for(n):
            await changes.wait_until(lambda: state["n"] >= n)
            woken.append(n)

        async with asyncio.TaskGroup() as tasks:
            for n in (1, 2, 3):
                tasks.create_task(wait_for(n))
            for n in (1, 2, 3):
                await asyncio.sleep(1)
                state["n"] = n
                changes.notify()
        return woken

    assert clock.run(main()) == [1, 2, 3]
