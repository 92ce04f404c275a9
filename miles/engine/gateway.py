"""One address for everybody outside the worker: hooks' requests in, the routed engine's reply out.

Serves ``args.sglang_router_ip`` / ``_port`` on the loop that owns the routing table: every POST goes to the engine that
the routing gives (``X-SMG-Routing-Key`` keeps a conversation on one engine), repeated like the worker's own requests.
"""

from __future__ import annotations

from typing import Any

import orjson
from aiohttp import web

from miles.engine.client import EngineClient
from miles.engine.wire import Reply
from miles.errors import NoEngine

ROUTING_HEADER = "X-SMG-Routing-Key"


class Gateway:
    """``start`` gives the port; ``close`` twice is fine."""

    def __init__(self, client: EngineClient, *, host: str, port: int = 0) -> None:
        self._client = client
        self._host = host
        self._port = port
        self._runner: web.AppRunner | None = None

    async def start(self) -> int:
        """Binds and serves. Raises OSError where the port is taken."""
        app = web.Application(client_max_size=256 * 1024**2)
        app.router.add_get("/health", self._health)
        app.router.add_get("/workers", self._workers)
        app.router.add_get("/list_workers", self._list_workers)
        app.router.add_get("/model_info", self._model_info)
        app.router.add_post("/{path:.*}", self._forward)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, self._port)
        await site.start()
        return int(self._runner.addresses[0][1])

    async def close(self) -> None:
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    async def _health(self, request: web.Request) -> web.Response:
        up = bool(self._client.table.routed())
        return _json({"status": "ok" if up else "no engine in the routing"}, 200 if up else 503)

    async def _workers(self, request: web.Request) -> web.Response:
        return _json({"workers": self._client.table.statistics()})

    async def _list_workers(self, request: web.Request) -> web.Response:
        return _json({"urls": list(self._client.table.engines)})

    async def _model_info(self, request: web.Request) -> web.Response:
        """The oldest version that any routed engine serves: whoever asks must not take old tokens for new."""
        versions = [e.version for e in self._client.table.routed() if e.version is not None]
        return _json({"weight_version": str(min(versions)) if versions else "default"})

    async def _forward(self, request: web.Request) -> web.Response:
        try:
            payload: Any = orjson.loads(await request.read())
        except orjson.JSONDecodeError as error:
            return _json({"error": f"the body is no JSON: {error}"}, 400)
        try:
            reply: Reply = await self._client.forward(
                request.path, payload, routing_key=request.headers.get(ROUTING_HEADER)
            )
        except NoEngine as error:
            return _json({"error": str(error)}, 503)
        return _json(reply.body, reply.status)


def _json(body: Any, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(body), status=status, content_type="application/json")
