"""Requests that share an engine: when each is done, and how fast a fake engine is under load."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.engine.client import EngineClient
from miles.engine.fake import FakeEngine, FakeFleet
from miles.engine.router import RoutingTable
from miles.engine.shared_service import SharedService
from miles.sim import clock


def ends_of(arrivals, saturation=2.0, pauses=()):
    """When each (time, work) is done."""

    async def main():
        service, loop = SharedService(saturation), asyncio.get_running_loop()
        for begin, end in pauses:
            loop.call_later(begin, service.pause)
            loop.call_later(end, service.resume)

        async def one(at, work):
            await asyncio.sleep(at)
            await service.begin(work).done
            return loop.time()

        ends = await asyncio.gather(*(one(*a) for a in arrivals))
        return ends, service.served_s

    return clock.run(main())


@pytest.mark.parametrize(
    ("arrivals", "ends"),
    [
        ([(0, 1), (0, 3)], [1, 3]),
        ([(0, 1), (0, 1), (0, 1), (0, 1)], [2, 2, 2, 2]),
        ([(0, 2), (0, 2), (1, 1), (1, 1)], [3, 3, 3, 3]),
        ([(0, 4), (0, 2), (0, 2)], [5, 3, 3]),
    ],
)
def test_speed_is_flat_up_to_saturation_and_then_shared(arrivals, ends):
    assert ends_of(arrivals)[0] == pytest.approx(ends)


def test_nobody_is_served_in_a_pause():
    assert ends_of([(0, 2), (0, 1)], pauses=[(0.5, 3.5)])[0] == pytest.approx([5, 4])


@given(st.lists(st.tuples(st.floats(0, 9), st.floats(0.01, 5)), min_size=1, max_size=9), st.floats(1, 4))
def test_all_work_is_served_and_none_faster_than_alone(arrivals, saturation):
    ends, served = ends_of(arrivals, saturation)
    assert served == pytest.approx(sum(work for _, work in arrivals))
    assert all(end >= at + work - 1e-6 for end, (at, work) in zip(ends, arrivals, strict=True))
    assert max(ends) >= served / saturation - 1e-6


def generated(engine, during=lambda engine, loop: None):
    """Reply and time of a request of 10 tokens with a prompt of 4."""

    async def main():
        client = EngineClient(RoutingTable(engine_wait_s=9), FakeFleet({"http://e:1": engine}))
        client.table.add_fixed("http://e:1")
        loop = asyncio.get_running_loop()
        during(engine, loop)
        reply = await client.generate([1] * 4, {}, request_id="r", submit_version=1)
        return reply, loop.time()

    return clock.run(main())


def control(engine, loop, at, path, **payload):
    loop.call_later(at, lambda: asyncio.ensure_future(engine.answer(path, payload)))


def ten(**more):
    return FakeEngine(length=lambda p, r: 10, token_s=1.0, version="1", **more)


def test_a_prompt_is_read_before_the_first_token():
    assert generated(ten(prefill_s=0.5))[1] == pytest.approx(12)


def test_tokens_are_of_the_version_that_sampled_them():
    def during(engine, loop):
        control(engine, loop, 3.5, "/update_weights_from_disk", weight_version="2")

    assert generated(ten(), during)[0].spans == [(1, 0, 3), (2, 3, 10)]


@pytest.mark.parametrize(("mode", "ends"), [("in_place", 13), ("retract", 13 + 4 * 0.5 + 2 * 0.5)])
def test_retract_computes_prompt_and_tokens_again(mode, ends):
    def during(engine, loop):
        control(engine, loop, 4.5, "/pause_generation", mode=mode)
        control(engine, loop, 5.5, "/continue_generation")

    assert generated(ten(prefill_s=0.5), during)[1] == pytest.approx(ends)
