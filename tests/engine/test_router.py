"""The routing table: who takes the next request."""

import asyncio
from collections import deque

import pytest

from miles.engine.client import EngineClient
from miles.engine.fake import FakeEngine, FakeFleet, Reset, Status
from miles.engine.router import RoutingTable
from miles.errors import EngineFailed, NoEngine
from miles.sim import clock


def table_of(*urls):
    table = RoutingTable(engine_wait_s=300)
    for url in urls:
        table.add(url)
        table.restore(url, 1)
    return table


async def urls_of(table, count, key=None):
    taken = []
    for _ in range(count):
        async with table.lease(key) as engine:
            taken.append(engine.url)
    return taken


def test_the_least_loaded_engine_takes_the_request():
    async def main():
        table = table_of("a", "b")
        async with table.lease() as first, table.lease() as second, table.lease() as third:
            return [first.url, second.url, third.url], [e.running for e in table.routed()]

    taken, running = clock.run(main())
    assert set(taken[:2]) == {"a", "b"}
    assert sorted(running) == [1, 2]


def test_a_key_stays_on_its_engine_while_that_is_routed():
    async def main():
        table = table_of("a", "b")
        async with table.lease("conversation") as first, table.lease() as other:
            assert first.url != other.url
            async with table.lease("conversation") as again:
                assert again.url == first.url
        table.set_aside(first.url, "gone")
        return first.url, await urls_of(table, 2, "conversation")

    first, later = clock.run(main())
    assert first not in later
    assert len(set(later)) == 1


def test_a_recovered_engine_at_the_same_address_gets_traffic():
    """R1, script 19: set aside, removed, added again: no old record counts."""

    async def main():
        table = table_of("a", "b")
        for _ in range(3):
            table.set_aside("a", "connection refused")
        table.remove("a")
        table.add("a")
        table.restore("a", 1)
        leases = []
        for _ in range(10):
            lease = table.lease()
            leases.append((await lease.__aenter__()).url)
        return leases

    assert clock.run(main()).count("a") == 5


def test_requests_wait_for_an_engine_and_spend_nothing():
    async def main():
        table = table_of()
        table.add("a")
        asyncio.get_running_loop().call_later(299, table.restore, "a", 1)
        taken = await urls_of(table, 1)
        return taken, asyncio.get_running_loop().time()

    assert clock.run(main()) == (["a"], 299)


def test_with_no_engine_for_too_long_the_first_cause_is_told():
    async def main():
        table = table_of("a")
        table.set_aside("a", "out of memory")
        table.set_aside("a", "connection refused")
        await urls_of(table, 1)

    with pytest.raises(NoEngine, match=r"300 s.*first cause: a: out of memory"):
        clock.run(main())


def test_a_router_that_somebody_else_looks_after_is_asked_again():
    """A fixed address is never set aside: a broken connection is a pause, not the end of it."""

    async def main():
        fleet = {"http://router:1": FakeEngine(script=deque([Reset(), Reset()]))}
        client = EngineClient(RoutingTable(engine_wait_s=300), FakeFleet(fleet))
        client.table.add_fixed("http://router:1")
        reply = await client.generate([1], {}, request_id="r", submit_version=None)
        return len(reply.ids), asyncio.get_running_loop().time()

    tokens, took = clock.run(main())
    assert tokens == 4
    assert took < 1


def test_an_engine_that_answers_badly_three_times_in_a_row_is_set_aside():
    """Least-loaded routing would prefer it: it is always idle."""
    table = table_of("a", "b")
    for failure in ("500", None, "500", "500"):
        table.report("a", failure)
    assert len(table.routed()) == 2
    table.report("a", "503: overloaded")
    assert [(e.url, e.aside) for e in table.aside()] == [("a", "503: overloaded")]


@pytest.mark.parametrize("code", [500, 503])
def test_a_sick_engine_takes_no_part_while_another_serves(code):
    async def main():
        sick, well = FakeEngine(choose=lambda p: Status(code)), FakeEngine()
        client = EngineClient(
            table_of("http://sick:1", "http://well:1"), FakeFleet({"http://sick:1": sick, "http://well:1": well})
        )
        replies = []
        for i in range(20):
            try:
                replies.append(await client.generate([1], {}, request_id=str(i), submit_version=1))
            except EngineFailed:
                continue
        return len(replies), len(sick.requests), asyncio.get_running_loop().time()

    served, sick_requests, took = clock.run(main())
    assert served >= 17
    assert sick_requests == 3
    assert took < 5


def test_a_request_that_breaks_every_engine_is_not_repeated_for_ever():
    async def main():
        engines = {f"http://e{i}:1": FakeEngine(choose=lambda p: Reset()) for i in range(5)}
        client = EngineClient(table_of(*engines), FakeFleet(engines))
        await client.generate([1], {}, request_id="poison", submit_version=1)

    with pytest.raises(EngineFailed, match="broke 3 times"):
        clock.run(main())
