"""Publication through a process group: the order of the calls, and that no engine's death holds up or spoils the others."""

import asyncio
from urllib.parse import urlsplit

import pytest

from miles.engine.client import EngineClient
from miles.engine.router import RoutingTable
from miles.engine.wire import Reply
from miles.errors import EngineUnreachable
from miles.sim import clock
from miles.types import Weights
from miles.weights.publish import Publisher

SENDER = "http://trainer:9/token"
A, B = "http://a:1", "http://b:1"
BUCKETS = [{"names": [name], "dtypes": ["float32"], "shapes": [[2]]} for name in ("w", "v")]


class Servers:
    """SGLang's protocol and the sender's on the virtual clock; a broadcast ends when all of its group are in it."""

    def __init__(self, *, has_begin=True):
        self.calls = []
        self.has_begin = has_begin
        self.dead, self.refuses, self.hangs = set(), set(), set()
        self.labels = {A: "default", B: "default"}
        self.groups = {}
        self.inside = {}
        self.held = 0

    async def request(self, method, url, payload=None):
        parts = urlsplit(url)
        server = f"{parts.scheme}://{parts.netloc}"
        path = parts.path.removeprefix("/token")
        if server in self.dead:
            raise EngineUnreachable(f"{url}: dead")
        self.calls.append((server, path, payload))
        if server in self.hangs and path == "/update_weights_from_distributed":
            await asyncio.sleep(10_000)
        if path == "/open":
            self.groups[payload["group_name"]] = payload["world_size"]
            return Reply(200, {"master_address": "t", "master_port": 5, "backend": "gloo"})
        if path == "/buckets":
            good = payload["version"] == self.held
            return Reply(200, {"buckets": BUCKETS}) if good else Reply(400, {"error": "not held"})
        if path in ("/send", "/update_weights_from_distributed"):
            return await self.broadcast(server, payload)
        if path in ("/begin_weight_update", "/end_weight_update") and not self.has_begin:
            return Reply(404, {})
        if path == "/update_weight_version":
            self.labels[server] = payload["new_version"]
        if path == "/model_info":
            return Reply(200, {"weight_version": self.labels[server]})
        return Reply(200, {"success": True})

    async def broadcast(self, server, payload):
        if server in self.refuses:
            return Reply(500, {"error": {"message": "no memory"}})
        inside = self.inside.setdefault(payload["group_name"], [])
        inside.append(asyncio.Event())
        if len(inside) == self.groups[payload["group_name"]]:
            del self.inside[payload["group_name"]]
            for event in inside:
                event.set()
        own = inside[-1]
        await asyncio.wait_for(own.wait(), 30)
        return Reply(200, {"success": True})

    def of(self, server):
        return [path for who, path, _ in self.calls if who == server]

    async def close(self):
        pass


def run(servers, scenario, mode="retract"):
    async def main():
        client = EngineClient(RoutingTable(engine_wait_s=300), servers)
        publisher = Publisher(client, pause_mode=mode)
        for url in (A, B):
            client.table.add(url)
            client.table.restore(url, None)

        async def publish(version):
            servers.held = version
            await publisher.publish(Weights(version, "broadcast", SENDER))

        async with asyncio.TaskGroup() as tasks:
            recovery = tasks.create_task(publisher.run())
            result = await scenario(publish, client)
            recovery.cancel()
        return result

    return clock.run(main())


@pytest.mark.parametrize(("mode", "flushes"), [("retract", True), ("in_place", False), ("abort", True)])
def test_calls_come_in_the_order_that_sglang_is_driven_in(mode, flushes):
    servers = Servers()

    async def scenario(publish, client):
        await publish(3)
        await publish(4)

    run(servers, scenario, mode)
    update = [
        "/update_weights_from_distributed",
        "/update_weights_from_distributed",
        "/update_weight_version",
        "/end_weight_update",
        "/continue_generation",
    ]
    start = ["/pause_generation", *(["/flush_cache"] if flushes else []), "/begin_weight_update"]
    for server in (A, B):
        assert servers.of(server) == [*start, "/init_weights_update_group", *update, *start, *update]
        assert servers.labels[server] == "4"
    [first, second] = [p for who, path, p in servers.calls if path == "/init_weights_update_group"]
    assert first == {
        "master_address": "t", "master_port": 5, "backend": "gloo", "world_size": 3, "rank_offset": 1,
        "group_name": "miles-weights-0",
    }  # fmt: skip
    assert second == first | {"rank_offset": 2}
    bucket = next(p for _, path, p in servers.calls if path == "/update_weights_from_distributed")
    assert bucket == BUCKETS[0] | {"group_name": "miles-weights-0", "flush_cache": False, "weight_version": "3"}


def test_a_server_without_begin_and_end_is_updated_all_the_same():
    servers = Servers(has_begin=False)

    async def scenario(publish, client):
        await publish(3)
        return len(client.table.routed())

    assert run(servers, scenario) == 2
    assert servers.labels == {A: "3", B: "3"}
    assert "/end_weight_update" not in servers.of(A)


@pytest.mark.parametrize("fault", ["dead", "refuses", "hangs"])
def test_an_engine_that_fails_in_the_middle_costs_the_others_a_repetition_within_limits(fault):
    servers = Servers()

    async def scenario(publish, client):
        await publish(1)
        getattr(servers, fault).add(B)
        started = asyncio.get_running_loop().time()
        await publish(2)
        took = asyncio.get_running_loop().time() - started
        routed = [e.url for e in client.table.routed()]
        await publish(3)
        getattr(servers, fault).discard(B)
        await client.table.changes.wait_until(lambda: len(client.table.routed()) == 2)
        await publish(4)
        return took, routed

    took, routed = run(servers, scenario)
    assert routed == [A]
    assert took < 200
    assert servers.labels == {A: "4", B: "4"}
    sizes = [p["world_size"] for _, path, p in servers.calls if path == "/open"]
    assert sizes[0] == sizes[-1] == 3, "once B is back, one group has both again"


def test_an_engine_left_with_half_of_the_weights_stays_paused():
    servers = Servers(has_begin=False)
    servers.refuses.add(B)

    async def scenario(publish, client):
        await publish(1)
        return servers.of(B)

    assert "/continue_generation" not in run(servers, scenario)
