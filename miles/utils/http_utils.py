"""Door: the two calls that hooks make to the router or to services of their own."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp

from miles.engine.client import REPEATED_STATUS, backoff
from miles.errors import EngineFailed, EngineRefused, EngineUnreachable


async def post(url: str, payload: Any, max_retries: int = 60) -> Any:
    """The JSON reply to a POST. Broken connections and 502, 503, 504 are tried again, up to ``max_retries`` times.

    Raises `EngineRefused` on a 4xx at once, `EngineFailed` on another error, `EngineUnreachable` where no try got through.
    """
    return await _request("POST", url, payload, max_retries)


async def get(url: str, max_retries: int = 60) -> Any:
    """The JSON reply to a GET; repeats and raises like `post`."""
    return await _request("GET", url, None, max_retries)


async def _request(method: str, url: str, payload: Any, max_retries: int) -> Any:
    problem = ""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
        for attempt, delay in zip(range(max_retries + 1), backoff(), strict=False):
            try:
                async with session.request(method, url, json=payload) as reply:
                    if reply.status == 200:
                        return await reply.json(content_type=None)
                    problem = f"{reply.status}: {(await reply.text())[:500]}"
                    if reply.status not in REPEATED_STATUS:
                        error = EngineRefused if 400 <= reply.status < 500 else EngineFailed
                        raise error(f"{method} {url} answered {problem}")
            except aiohttp.ClientError as error:
                problem = f"{type(error).__name__}: {error}"
            if attempt < max_retries:
                await asyncio.sleep(delay)
    raise EngineUnreachable(f"{method} {url}: no answer after {max_retries + 1} tries; the last said {problem}")
