"""Scripted replies and a latency model behind the engine's protocol, on any clock: a shipped implementation, tests use it.

`FakeFleet` is a `Transport`: it hands each request to the `FakeEngine` of its address. An engine answers ``/generate`` by
a script, request after request, then as ``choose`` says, and where that says nothing by sampling made-up tokens.

    Say(5)        5 tokens, then stop            Hang()         never answers
    Say(8, "length")                             Reset()        the connection breaks
    Say(5, "abort")                              Status(503)    an error, at once
    Raw({...})    this body, as it is
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from miles.engine.wire import Reply
from miles.errors import EngineUnreachable


@dataclass(frozen=True)
class Say:
    tokens: int
    finish: str = "stop"


@dataclass(frozen=True)
class Status:
    code: int
    message: str = "scripted"


@dataclass(frozen=True)
class Raw:
    body: Any


class Hang:
    """Never answers."""


class Reset:
    """The connection breaks before an answer."""


Action = Say | Status | Raw | Hang | Reset


@dataclass
class FakeEngine:
    """One engine. ``length`` draws the response length (tokens) of a request; each token takes ``token_s`` seconds."""

    script: deque[Action] = field(default_factory=deque)
    choose: Callable[[dict[str, Any]], Action | None] = lambda payload: None
    version: str = "default"
    tells_spans: bool = True
    token_s: float = 0.01
    length: Callable[[dict[str, Any], random.Random], int] = lambda payload, rng: 4
    update_s: float = 0.0
    refuse_after_update_s: float = 0.0
    fails_update: bool = False
    health: deque[int] = field(default_factory=deque)
    aborts_on_version: bool = True
    dead: bool = False
    requests: list[dict[str, Any]] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    most_running: int = 0
    aborted: int = 0
    _running: dict[str, asyncio.Event] = field(default_factory=dict)
    _gate: asyncio.Event | None = None
    _refuse_until: float = -1.0

    async def answer(self, path: str, payload: Any) -> Reply:
        """The reply to one request. Raises `EngineUnreachable` where a real engine would break the connection."""
        if self.dead or asyncio.get_running_loop().time() < self._refuse_until:
            raise EngineUnreachable(f"fake engine refuses {path}")
        self.calls.append(path)
        if path == "/generate":
            return await self._generate(payload)
        if path == "/health":
            return Reply(self.health.popleft() if self.health else 200, {})
        if path == "/model_info":
            return Reply(200, {"model_path": "fake", "weight_version": self.version})
        return await self._control(path, payload or {})

    def kill(self) -> None:
        """Breaks every running request and answers nothing until `revive`."""
        self.dead = True
        for stop in self._running.values():
            stop.set()

    def revive(self) -> None:
        """Back with an empty script and no weights published to it."""
        self.dead, self.version, self._gate = False, "default", None

    # ---- control

    async def _control(self, path: str, payload: dict[str, Any]) -> Reply:
        if path == "/pause_generation":
            self._open_gate().clear()
            if payload.get("mode") == "abort":
                self._abort_all()
        elif path == "/continue_generation":
            self._open_gate().set()
        elif path == "/abort_request":
            for rid, stop in self._running.items():
                if payload.get("abort_all") or rid == payload.get("rid"):
                    stop.set()
        elif path == "/update_weight_version":
            self.version = payload["new_version"]
            if payload.get("abort_all_requests", self.aborts_on_version):
                self._abort_all()
        elif path.startswith("/update_weights"):
            return await self._update(payload)
        return Reply(200, {"success": True})

    async def _update(self, payload: dict[str, Any]) -> Reply:
        await asyncio.sleep(self.update_s)
        if self.dead:
            raise EngineUnreachable("fake engine died in an update")
        if self.fails_update:
            return Reply(400, {"error": "scripted: update refused"})
        if payload.get("mode") == "abort":
            self._abort_all()
        self.version = payload["weight_version"]
        if self.refuse_after_update_s:
            self._refuse_until = asyncio.get_running_loop().time() + self.refuse_after_update_s
        return Reply(200, {"success": True})

    def _abort_all(self) -> None:
        for stop in self._running.values():
            stop.set()

    def _open_gate(self) -> asyncio.Event:
        if self._gate is None:
            self._gate = asyncio.Event()
            self._gate.set()
        return self._gate

    # ---- generation

    async def _generate(self, payload: dict[str, Any]) -> Reply:
        self.requests.append(payload)
        action = self.script.popleft() if self.script else self.choose(payload)
        rng = random.Random(payload["sampling_params"].get("sampling_seed", payload["rid"]))
        if isinstance(action, Status):
            return Reply(action.code, {"error": action.message})
        if isinstance(action, Raw):
            return Reply(200, action.body)
        if isinstance(action, Reset):
            raise EngineUnreachable("fake engine reset the connection")
        stop = asyncio.Event()
        self._running[payload["rid"]] = stop
        self.most_running = max(self.most_running, len(self._running))
        try:
            if isinstance(action, Hang):
                await stop.wait()
                raise EngineUnreachable("fake engine broke a hanging request")
            params = payload["sampling_params"]
            want = action.tokens if action else self.length(payload, rng)
            limit = params.get("max_new_tokens") or want
            if params.get("ignore_eos") and action is None:
                want = limit + 1
            finish = action.finish if action else ("length" if want > limit else "stop")
            return await self._sample(payload, min(want, limit), finish, stop, rng)
        finally:
            del self._running[payload["rid"]]

    async def _sample(
        self, payload: dict[str, Any], count: int, finish: str, stop: asyncio.Event, rng: random.Random
    ) -> Reply:
        entries = [[-rng.random(), rng.randrange(1, 100), None] for _ in range(count)]
        ends = payload["sampling_params"].get("stop_token_ids") or ()
        for at, (_, token, _) in enumerate(entries):
            if token in ends:
                count, finish = at + 1, "stop"
                break
        versions: list[str] = []
        while len(versions) < count and not stop.is_set():
            await self._open_gate().wait()
            await asyncio.sleep(self.token_s)
            versions.append(self.version)
        if self.dead:
            raise EngineUnreachable("fake engine died")
        if stop.is_set() and len(versions) < count:
            finish = "abort"
            self.aborted += 1
        entries = entries[: len(versions)]
        meta: dict[str, Any] = {
            "id": payload["rid"],
            "finish_reason": {"type": finish},
            "prompt_tokens": len(payload["input_ids"]),
            "completion_tokens": len(versions),
            "output_token_logprobs": entries,
            "weight_version": self.version,
        }
        if self.tells_spans and all(v.isdigit() for v in versions):
            meta["weight_versions"] = _runs(versions)
        return Reply(200, {"text": " ".join(str(e[1]) for e in entries), "meta_info": meta})


def _runs(versions: Iterable[str]) -> list[dict[str, Any]]:
    """[1, 1, 2] to [{version 1, 0..2}, {version 2, 2..3}]."""
    spans: list[dict[str, Any]] = []
    for at, version in enumerate(versions):
        if spans and spans[-1]["version"] == version:
            spans[-1]["end"] = at + 1
        else:
            spans.append({"version": version, "start": at, "end": at + 1})
    return spans


class FakeFleet:
    """A `Transport` to fake engines by address."""

    def __init__(self, engines: dict[str, FakeEngine]) -> None:
        self.engines = engines

    async def request(self, method: str, url: str, payload: Any = None) -> Reply:
        parts = urlsplit(url)
        engine = self.engines.get(f"{parts.scheme}://{parts.netloc}")
        if engine is None:
            raise EngineUnreachable(f"nobody at {url}")
        return await engine.answer(parts.path, payload)

    async def close(self) -> None:
        for engine in self.engines.values():
            engine.kill()
