"""Requests to engines over real HTTP: one connection pool, opened and closed on the event loop that uses it."""

from __future__ import annotations

from typing import Any

import aiohttp
import orjson

from miles.engine.wire import Reply
from miles.errors import EngineUnreachable


class HttpTransport:
    """`Transport` over aiohttp. The pool opens with the first request and belongs to that request's loop."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    async def request(self, method: str, url: str, payload: Any = None) -> Reply:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=30)
            self._session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
        body = None if payload is None else orjson.dumps(payload, option=orjson.OPT_SERIALIZE_NUMPY)
        headers = {"Content-Type": "application/json"} if body is not None else None
        try:
            async with self._session.request(method, url, data=body, headers=headers) as response:
                raw = await response.read()
        except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
            raise EngineUnreachable(f"{method} {url}: {error or type(error).__name__}") from error
        try:
            return Reply(response.status, orjson.loads(raw) if raw else None)
        except orjson.JSONDecodeError:
            return Reply(response.status, raw.decode(errors="replace"))

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()
