"""A served engine in this process: its ASGI application behind an HTTP client, and requests frozen at a known token."""

import asyncio
import contextlib
from pathlib import Path

import httpx

from miles.engine.local.application import Application
from miles.engine.local.server import EngineOptions, open_service
from tests.engine.local.tiny import steps

PROMPT = [5, 9, 2]
GREEDY = {"temperature": 0, "ignore_eos": True}


class Server:
    """A served engine. ``client`` speaks HTTP to it; conditions are awaited, never slept for."""

    def __init__(self, service):
        self.service = service
        self.app = Application(service)
        self.client = httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://engine")

    async def generate(self, new, prompt=PROMPT, rid=None, **params):
        return await self.post(
            "/generate",
            input_ids=prompt,
            sampling_params=GREEDY | {"max_new_tokens": new} | params,
            return_logprob=True,
            rid=rid,
        )

    async def post(self, endpoint, /, **body):
        return await self.client.post(endpoint, json=body, timeout=60)

    async def version(self):
        return (await self.client.get("/model_info")).json()["weight_version"]

    async def wait_waiting(self, count):
        """Until ``count`` requests wait; only a paused engine has them wait for long."""
        while await self.service.between_steps(lambda: self.service.engine.waiting) != count:
            pass

    async def frozen(self, *generations, tokens=3):
        """Starts requests and freezes them in place when each has so many tokens."""
        await self.post("/pause_generation", mode="in_place")
        tasks = [asyncio.create_task(g) for g in generations]
        await self.wait_waiting(len(tasks))
        await self.service.between_steps(lambda: self.advance(tokens))
        return tasks

    def advance(self, count):
        engine = self.service.engine
        engine.resume()
        steps(engine, count)
        engine.pause("in_place")


@contextlib.asynccontextmanager
async def serving(folder: Path, **options):
    service = open_service(EngineOptions(folder, dtype="float32", **options))
    server = Server(service)
    try:
        yield server
    finally:
        await server.client.aclose()
        service.thread.stop()
        assert await asyncio.to_thread(service.thread.wait_stopped, 30)


def served(test):
    """Runs a coroutine test with a server over the folder of its ``folder`` fixture."""

    def run(folder, other_folder, tmp_path):
        async def main():
            async with serving(folder) as server:
                names = test.__code__.co_varnames[1 : test.__code__.co_argcount]
                fixtures = {"folder": folder, "other_folder": other_folder, "tmp_path": tmp_path}
                await test(server, **{name: fixtures[name] for name in names})

        asyncio.run(main())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


def message(reply):
    return reply.json()["error"]["message"]


def spans(reply):
    return [(s["version"], s["start"], s["end"]) for s in reply.json()["meta_info"]["weight_versions"]]


def reason(reply):
    return reply.json()["meta_info"]["finish_reason"]["type"]
