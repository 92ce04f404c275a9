"""One session of a session server: opened, spoken to by an agent under its address, read out as samples, closed.

POST /sessions ─▶ agent chats at <url>/v1/chat/completions ─▶ POST /sessions/{id}/samples ─▶ DELETE /sessions/{id}
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from copy import deepcopy
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import aiohttp

from miles.engine.client import REPEATED_STATUS, backoff
from miles.errors import EngineFailed, EngineRefused, EngineUnreachable
from miles.types import PrefixCacheInfo, Sample, Status, VersionSpan

TRIES = 8
META = "_samples_meta"


@dataclass(frozen=True)
class Session:
    """``server``: its address as host:port; ``instance_id``: which start of that server, where it says so."""

    id: str
    server: str
    instance_id: str | None
    http: aiohttp.ClientSession

    @property
    def url(self) -> str:
        return f"http://{self.server}/sessions/{self.id}"

    async def samples(self, issued: Sample, max_seq_len: int | None, metadata: dict[str, Any]) -> list[Sample]:
        """What the session recorded, as copies of ``issued``; none where there is nothing to train on."""
        body = {"max_seq_len": max_seq_len} | ({"metadata": metadata} if metadata else {})
        return decode_samples(await _request(self.http, "POST", self.url + "/samples", body), issued)


@asynccontextmanager
async def session_at(server: str) -> AsyncIterator[Session]:
    """A session that is deleted at the end. Raises `EngineUnreachable`, `EngineFailed` or `EngineRefused`."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as http:
        health = json.loads(await _request(http, "GET", f"http://{server}/health"))
        made = json.loads(await _request(http, "POST", f"http://{server}/sessions", {}))
        session = Session(made["session_id"], server, health.get("session_server_instance_id"), http)
        try:
            yield session
        finally:
            await _close(session)


async def _close(session: Session) -> None:
    """A session that can't be deleted is the server's to forget: the samples are read out by then."""
    try:
        async with asyncio.timeout(10), session.http.delete(session.url):
            pass
    except (TimeoutError, aiohttp.ClientError):
        return


async def _request(http: aiohttp.ClientSession, method: str, url: str, payload: Any = None) -> bytes:
    problem = ""
    for attempt, delay in zip(range(TRIES), backoff(), strict=False):
        try:
            async with http.request(method, url, json=payload) as reply:
                body = await reply.read()
                if reply.status < 300:
                    return body
                problem = f"{reply.status}: {body[:500].decode(errors='replace')}"
                if reply.status not in REPEATED_STATUS:
                    error = EngineRefused if 400 <= reply.status < 500 else EngineFailed
                    raise error(f"{method} {url} answered {problem}")
        except aiohttp.ClientError as error:
            problem = f"{type(error).__name__}: {error}"
        if attempt + 1 < TRIES:
            await asyncio.sleep(delay)
    raise EngineUnreachable(f"{method} {url}: no answer after {TRIES} tries; the last said {problem}")


# ---- samples on the wire


def decode_samples(body: bytes, issued: Sample) -> list[Sample]:
    """A safetensors body (tensors ``field.i``, JSON in ``_samples_meta``) as copies of ``issued`` with those fields.

    Raises `EngineFailed` where it is none or its arrays don't fit together.
    """
    from safetensors.numpy import load

    try:
        tensors = load(body)
        meta = json.loads(tensors.pop(META).tobytes())
        samples = [_sample(fields, _tensors_of(at, tensors), issued) for at, fields in enumerate(meta["samples"])]
        for sample in samples:
            sample.validate()
    except Exception as error:  # whatever is wrong with the bytes of a server: they are an unusable reply
        raise EngineFailed(f"unusable samples of a session ({type(error).__name__}: {error})") from error
    return samples


def _tensors_of(at: int, tensors: dict[str, Any]) -> dict[str, Any]:
    return {name.removesuffix(f".{at}"): value for name, value in tensors.items() if name.endswith(f".{at}")}


def _sample(fields: dict[str, Any], tensors: dict[str, Any], issued: Sample) -> Sample:
    sample = deepcopy(issued)
    sample.reset_for_retry()
    sample.submit_version = issued.submit_version
    sample.metadata |= fields.pop("metadata", None) or {}
    sample.status = Status(fields.pop("status"))
    sample.prefix_cache_info = PrefixCacheInfo.from_dict(fields.pop("prefix_cache_info", None) or {})
    for name, value in {**fields, **{n: _plain(n, t) for n, t in tensors.items()}}.items():
        if not hasattr(sample, name):
            raise ValueError(f"a sample has no field {name!r}")
        setattr(sample, name, value)
    sample.weight_versions = [str(v) for v in sample.weight_versions or []]
    sample.version_spans = _spans(sample.loss_mask or [], sample.weight_versions)
    return sample


def _plain(name: str, tensor: Any) -> Any:
    return tensor if name.startswith("rollout_routed") or name.startswith("rollout_indexer") else tensor.tolist()


def _spans(mask: Sequence[int], versions: Sequence[str]) -> list[VersionSpan]:
    """One span for each stretch of sampled tokens, where there are as many versions; else nobody knows which is which."""
    spans, at = [], 0
    for sampled, stretch in groupby(mask):
        length = len(list(stretch))
        if sampled:
            spans.append((at, at + length))
        at += length
    if len(spans) != len(versions):
        return []
    labels = [int(v) if v.isdigit() else None for v in versions]
    return [VersionSpan(label, *span) for label, span in zip(labels, spans, strict=True)]
