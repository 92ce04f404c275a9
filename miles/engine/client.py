"""A prompt's token ids in, sampled ids with log-probs and version spans out: the only client to engines.

It repeats requests and nobody else does: a broken connection, 502, 503 and 504 are tried again with the same id for as
long as the caller's time limit lasts; a 4xx never is. An engine that can't be reached leaves the routing at once.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from miles.engine.router import RoutingTable
from miles.engine.wire import Reply, Transport
from miles.errors import EngineFailed, EngineRefused, EngineUnreachable
from miles.types import VersionSpan

REPEATED_STATUS = frozenset({502, 503, 504})
BROKEN_CONNECTIONS = 3


def backoff(first_s: float = 0.1, most_s: float = 5.0) -> Iterator[float]:
    """Waiting times between two tries, in seconds: doubled each time, up to ``most_s``."""
    delay = first_s
    while True:
        yield delay
        delay = min(delay * 2, most_s)


@dataclass(frozen=True)
class Generation:
    """One reply: ``ids``, their ``log_probs`` and ``spans`` (relative to ``ids``); ``finish``: stop, length or abort."""

    ids: list[int]
    log_probs: list[float]
    spans: list[VersionSpan]
    finish: str
    text: str
    meta_info: dict[str, Any]


class EngineClient:
    """Sends requests to the engines of a routing table."""

    def __init__(self, table: RoutingTable, transport: Transport) -> None:
        self.table = table
        self._transport = transport

    async def generate(
        self,
        input_ids: list[int],
        sampling_params: dict[str, Any],
        *,
        request_id: str,
        submit_version: int | None,
        routing_key: str | None = None,
    ) -> Generation:
        """Samples from the engine that the routing gives.

        ``submit_version`` is the version published when the request starts; tokens whose version the engine doesn't tell
        are given that one, never a newer. Raises `EngineRefused` (4xx), `EngineFailed` (500, unusable reply) or
        `NoEngine`; the caller bounds the time.
        """
        payload = {
            "rid": request_id,
            "input_ids": input_ids,
            "sampling_params": sampling_params,
            "return_logprob": True,
        }
        body = await self.post("/generate", payload, routing_key=routing_key)
        return parse_generation(body, submit_version)

    async def post(self, path: str, payload: Any, *, routing_key: str | None = None) -> Any:
        """The JSON body of the reply, whichever engine is routed to. Raises like `generate`."""
        return _body(await self.forward(path, payload, routing_key=routing_key), path)

    async def forward(self, path: str, payload: Any, *, routing_key: str | None = None) -> Reply:
        """The engine's reply, good or bad, once repeating has ended.

        Raises `NoEngine`, and `EngineFailed` where the connection broke again and again: the request may be what kills.
        """
        broken = 0
        for delay in backoff():
            async with self.table.lease(routing_key) as engine:
                try:
                    reply = await self._transport.request("POST", engine.url + path, payload)
                    bad = f"{path} answered {reply.status}: {_said(reply.body)[:500]}" if reply.status >= 500 else None
                    self.table.report(engine.url, bad)
                    if reply.status not in REPEATED_STATUS:
                        return reply
                except EngineUnreachable as error:
                    broken += not engine.fixed
                    if broken == BROKEN_CONNECTIONS:
                        raise EngineFailed(f"the connection broke {broken} times; the last time: {error}") from error
                    self.table.set_aside(engine.url, str(error))
            await asyncio.sleep(delay)
        raise AssertionError("backoff never ends")

    async def control(self, url: str, path: str, payload: Any, *, timeout_s: float) -> Any:
        """One control call to one engine, tried once. Raises `EngineError`; no reply in time is `EngineUnreachable`."""
        method = "GET" if payload is None else "POST"
        try:
            async with asyncio.timeout(timeout_s):
                reply = await self._transport.request(method, url + path, payload)
        except TimeoutError:
            raise EngineUnreachable(f"{url}{path}: no reply in {timeout_s:g} s") from None
        return _body(reply, url + path)

    async def close(self) -> None:
        await self._transport.close()


def _body(reply: Reply, url: str) -> Any:
    if reply.status == 200:
        return reply.body
    error = EngineRefused if 400 <= reply.status < 500 else EngineFailed
    raise error(f"{url} answered {reply.status}: {_said(reply.body)[:500]}")


def _said(body: Any) -> str:
    """The words of an error body: ``{"error": {"message": ...}}``, ``{"error": ...}``, or whatever it is."""
    for key in ("error", "message"):
        if isinstance(body, dict) and key in body:
            body = body[key]
    return str(body)


def parse_generation(body: Any, submit_version: int | None) -> Generation:
    """Checks a ``/generate`` reply and gives its tokens versions.

    An aborted reply may lack log-probs and tokens altogether. Raises `EngineFailed` where ids and log-probs don't
    belong together or a log-prob is not finite.
    """
    try:
        return _parse(body, submit_version)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise EngineFailed(f"unusable reply ({type(error).__name__}: {error}): {str(body)[:200]}") from error


def _parse(body: Any, submit_version: int | None) -> Generation:
    meta = body["meta_info"]
    entries = meta.get("output_token_logprobs") or []
    log_probs, ids = [float(e[0]) for e in entries], [int(e[1]) for e in entries]
    told = body.get("output_ids")
    if told is not None and list(told) != ids:
        raise EngineFailed(f"reply has {len(told)} token ids but {len(ids)} log-probs")
    if not all(math.isfinite(p) for p in log_probs):
        raise EngineFailed(f"log-prob {next(p for p in log_probs if not math.isfinite(p))} in a reply")
    finish = (meta.get("finish_reason") or {}).get("type", "stop")
    if not ids and (body.get("text") or meta.get("completion_tokens")):
        raise EngineFailed("reply has text but no token ids; text is never encoded again")
    return Generation(ids, log_probs, _spans(meta, len(ids), submit_version), finish, body.get("text") or "", meta)


def _spans(meta: dict[str, Any], count: int, submit_version: int | None) -> list[VersionSpan]:
    told = meta.get("weight_versions")
    if isinstance(told, list) and told and all(isinstance(s, dict) for s in told):
        spans = [VersionSpan(version_of(s.get("version")), int(s["start"]), int(s["end"])) for s in told]
        edges = [0, *(s.end for s in spans)]
        if edges[-1] != count or any(s.start != edge for s, edge in zip(spans, edges, strict=False)):
            raise EngineFailed(f"version spans {told} don't cover the {count} tokens of the reply")
        return [s if s.version is not None else s._replace(version=submit_version) for s in spans if s.end > s.start]
    if not count:
        return []
    known = [v for v in (version_of(meta.get("weight_version")), submit_version) if v is not None]
    return [VersionSpan(min(known, default=None), 0, count)]


def version_of(label: Any) -> int | None:
    """The number in a version label; None for labels that say nothing ("default", "", None)."""
    text = str(label)
    return int(text) if text.isdigit() else None
