"""One address for hooks: requests through the gateway reach the routed engine, whatever the engine answers."""

import asyncio

import pytest

from miles.engine.client import EngineClient
from miles.engine.fake import FakeEngine, FakeFleet, Reset, Status
from miles.engine.gateway import Gateway
from miles.engine.router import RoutingTable
from miles.errors import EngineRefused, EngineUnreachable
from miles.utils.http_utils import get, post
from tests.virtual import fleet_of

REQUEST = {"rid": "1", "input_ids": [1, 2], "sampling_params": {"max_new_tokens": 3}}


def through_gateway(scenario, *engines, wait_s=5.0):
    """Runs ``scenario(url, table)`` against a gateway over fake engines, all routed to."""

    async def main():
        fleet = fleet_of(*engines)
        table = RoutingTable(engine_wait_s=wait_s)
        for url in fleet:
            table.add(url)
            table.restore(url, 7)
        gateway = Gateway(EngineClient(table, FakeFleet(fleet)), host="127.0.0.1")
        port = await gateway.start()
        try:
            return await scenario(f"http://127.0.0.1:{port}", table)
        finally:
            await gateway.close()
            await gateway.close()

    return asyncio.run(main())


def test_a_hooks_post_reaches_the_engine():
    async def scenario(url, table):
        return await post(f"{url}/generate", REQUEST)

    engine = FakeEngine(token_s=0.0)
    assert through_gateway(scenario, engine)["meta_info"]["completion_tokens"] == 3
    assert engine.requests == [REQUEST]


def test_a_refusal_comes_through_and_is_not_repeated():
    engine = FakeEngine()
    engine.script.append(Status(400, "context too long"))

    async def scenario(url, table):
        with pytest.raises(EngineRefused, match="context too long"):
            await post(f"{url}/generate", REQUEST)

    through_gateway(scenario, engine)
    assert len(engine.requests) == 1


def test_a_broken_engine_is_replaced_by_another():
    broken, good = FakeEngine(token_s=0.0), FakeEngine(token_s=0.0)
    broken.script.append(Reset())

    async def scenario(url, table):
        reply = await post(f"{url}/generate", REQUEST)
        return reply, [e.url for e in table.routed()]

    reply, routed = through_gateway(scenario, broken, good)
    assert reply["meta_info"]["completion_tokens"] == 3
    assert len(routed) == 1


def test_it_tells_version_workers_and_health():
    async def scenario(url, table):
        told = [await get(f"{url}/{path}") for path in ("model_info", "list_workers", "workers", "health")]
        table.engines["http://engine1:1"].version = 6
        oldest = await get(f"{url}/model_info")
        return told, oldest

    (info, urls, workers, health), oldest = through_gateway(scenario, FakeEngine(), FakeEngine())
    assert info == {"weight_version": "7"}
    assert oldest == {"weight_version": "6"}
    assert urls == {"urls": ["http://engine0:1", "http://engine1:1"]}
    assert [w["aside"] for w in workers["workers"]] == [None, None]
    assert health["status"] == "ok"


def test_without_an_engine_the_wait_ends_with_503_and_the_cause():
    async def scenario(url, table):
        table.set_aside("http://engine0:1", "out of memory")
        with pytest.raises(EngineUnreachable, match=r"503.*out of memory"):
            await post(f"{url}/generate", REQUEST, max_retries=0)

    through_gateway(scenario, FakeEngine(), wait_s=0.01)
