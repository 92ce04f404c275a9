"""Publication and catch-up on the virtual clock."""

import asyncio

import pytest

from miles.engine.client import EngineClient
from miles.engine.fake import FakeEngine, FakeFleet
from miles.engine.router import RoutingTable
from miles.sim import clock
from miles.types import Weights
from miles.weights.publish import MOST_HELD, Publisher
from tests.virtual import fleet_of


def weights(version):
    return Weights(version, "shm", f"segment-{version % 2}")


def run(scenario, *engines, mode="retract"):
    """Runs ``scenario(publisher, client, urls)`` with every engine caught up with version 1."""

    async def main():
        fleet = fleet_of(*engines)
        client = EngineClient(RoutingTable(engine_wait_s=300), FakeFleet(fleet))
        publisher = Publisher(client, pause_mode=mode)
        for url in fleet:
            client.table.add(url)
        async with asyncio.TaskGroup() as tasks:
            recovery = tasks.create_task(publisher.run())
            await publisher.publish(weights(1))
            await client.table.changes.wait_until(lambda: len(client.table.routed()) == len(fleet))
            result = await scenario(publisher, client, list(fleet))
            recovery.cancel()
        return result

    return clock.run(main())


async def all_routed(client):
    await client.table.changes.wait_until(lambda: not client.table.aside())


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_an_update_aborts_no_running_request(mode):
    """V1, script 15: the engine's version endpoint aborts all unless told not to; 16 slow requests, one update."""
    engine = FakeEngine(length=lambda p, r: 50)

    async def scenario(publisher, client, urls):
        async with asyncio.TaskGroup() as tasks:
            requests = [
                tasks.create_task(client.generate([1], {}, request_id=str(i), submit_version=1)) for i in range(16)
            ]
            await asyncio.sleep(0.1)
            await publisher.publish(weights(2))
        return [r.result() for r in requests]

    replies = run(scenario, engine, mode=mode)
    assert engine.aborted == 0
    assert all(len(r.ids) == 50 and [s.version for s in r.spans] == [1, 2] for r in replies)


def test_a_failed_update_keeps_the_old_version_and_leaves_the_routing():
    good, bad = FakeEngine(), FakeEngine()

    async def scenario(publisher, client, urls):
        bad.fails_update = True
        await publisher.publish(weights(2))
        routed = [e.url for e in client.table.routed()]
        label = bad.version
        why = client.table.engines[urls[1]].aside
        bad.fails_update = False
        await all_routed(client)
        return routed, label, why, urls

    routed, label, why, urls = run(scenario, good, bad)
    assert routed == urls[:1]
    assert label == "1"
    assert "update refused" in why
    assert bad.version == "2"


def test_an_engine_that_hangs_in_an_update_does_not_hold_up_the_others():
    async def scenario(publisher, client, urls):
        started = asyncio.get_running_loop().time()
        slow.update_s = 1000.0
        await publisher.publish(weights(2))
        return [e.url for e in client.table.routed()], asyncio.get_running_loop().time() - started, urls

    slow = FakeEngine()
    routed, took, urls = run(scenario, FakeEngine(), slow)
    assert routed == urls[:1]
    assert took <= 11


def test_a_late_engine_catches_up_with_the_newest_weights_only():
    late = FakeEngine()

    async def scenario(publisher, client, urls):
        late.kill()
        client.table.set_aside(urls[1], "died")
        for version in (2, 3, 4):
            await publisher.publish(weights(version))
        late.revive()
        late.calls.clear()
        await all_routed(client)
        return late.calls.count("/update_weights_from_shared_memory")

    assert run(scenario, FakeEngine(), late) == 1
    assert late.version == "4"


def test_nothing_is_overwritten_while_an_engine_may_read_it():
    """An engine that is stopped across publications still maps its old segment: busy until it has moved on."""
    stopped = FakeEngine()

    async def scenario(publisher, client, urls):
        seen = [publisher.busy()]
        stopped.update_s = 1000.0
        await publisher.publish(Weights(2, "shm", "b"))
        seen.append(publisher.busy())
        stopped.update_s = 0.0
        await publisher.publish(Weights(3, "shm", "c"))
        await all_routed(client)
        seen.append(publisher.busy())
        return seen

    seen = run(scenario, FakeEngine(), stopped)
    assert seen == [{"segment-1"}, {"segment-1", "b"}, {"c"}]


def test_an_engine_that_only_lost_a_connection_is_not_updated_again():
    engine = FakeEngine()

    async def scenario(publisher, client, urls):
        engine.calls.clear()
        client.table.set_aside(urls[0], "connection reset")
        await all_routed(client)

    run(scenario, engine)
    assert "/update_weights_from_shared_memory" not in engine.calls
    assert "/continue_generation" in engine.calls


@pytest.mark.parametrize(("mode", "flush"), [("retract", True), ("in_place", False)])
def test_weights_on_a_disk_flush_the_cache_unless_requests_go_on_with_it(mode, flush):
    engine = FakeEngine()
    sent = []
    update = engine._update

    async def note(payload):
        sent.append(payload)
        return await update(payload)

    engine._update = note

    async def scenario(publisher, client, urls):
        await publisher.publish(Weights(2, "disk", "/weights/version_000002"))

    run(scenario, engine, mode=mode)
    assert sent[-1] == {"weight_version": "2", "model_path": "/weights/version_000002", "flush_cache": flush}


def test_an_engine_that_keeps_refusing_holds_no_segment():
    """It answered that it did not take the path, so the path is free again: shared memory does not grow."""
    refuses = FakeEngine()

    async def scenario(publisher, client, urls):
        refuses.fails_update = True
        sizes = []
        for version in range(2, 12):
            await publisher.publish(Weights(version, "shm", f"segment-{version}"))
            sizes.append(len(publisher.busy()))
        publisher.forget(urls[1])
        return sizes, publisher.busy()

    sizes, busy = run(scenario, FakeEngine(), refuses)
    assert max(sizes) <= 2
    assert busy == {"segment-11"}


def test_an_engine_that_answers_health_but_no_update_holds_a_bounded_number_of_segments():
    """Offered one of those that it may read already, it settles that, then catches up with the newest."""
    engine = FakeEngine()

    async def scenario(publisher, client, urls):
        engine.update_s = 1000.0
        sizes = []
        for version in range(2, 12):
            await publisher.publish(Weights(version, "shm", f"segment-{version}"))
            await asyncio.sleep(60)
            sizes.append(len(publisher.busy()))
        engine.update_s = 0.0
        await all_routed(client)
        return sizes, publisher.busy()

    sizes, busy = run(scenario, engine)
    assert max(sizes) <= MOST_HELD + 1
    assert busy == {"segment-11"}
    assert engine.version == "11"
