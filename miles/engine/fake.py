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
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from miles.engine.shared_service import SharedService
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
    """One engine. ``length`` draws the response length (tokens) of a request.

    Each token takes ``token_s`` seconds while at most ``saturation`` requests run; more of them share that speed. Reading
    a prompt takes ``prefill_s`` seconds a token, and again after each pause of mode retract, what was sampled included.
    Where it does not remember, ``requests`` and ``calls`` stay empty.
    """

    script: deque[Action] = field(default_factory=deque)
    choose: Callable[[dict[str, Any]], Action | None] = lambda payload: None
    version: str = "default"
    tells_spans: bool = True
    token_s: float = 0.01
    prefill_s: float = 0.0
    saturation: float = math.inf
    remembers: bool = True
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
    _running: dict[str, _Request] = field(default_factory=dict)
    _refuse_until: float = -1.0

    def __post_init__(self) -> None:
        self.service = SharedService(self.saturation)

    async def answer(self, path: str, payload: Any) -> Reply:
        """The reply to one request. Raises `EngineUnreachable` where a real engine would break the connection."""
        if self.dead or asyncio.get_running_loop().time() < self._refuse_until:
            raise EngineUnreachable(f"fake engine refuses {path}")
        if self.remembers:
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
        self._abort_all()

    def revive(self) -> None:
        """Back with an empty script and no weights published to it."""
        self.dead, self.version, self.service = False, "default", SharedService(self.saturation)

    # ---- control

    async def _control(self, path: str, payload: dict[str, Any]) -> Reply:
        if path == "/pause_generation":
            self._pause(payload.get("mode"))
        elif path == "/continue_generation":
            self.service.resume()
        elif path == "/abort_request":
            for rid, request in self._running.items():
                if payload.get("abort_all") or rid == payload.get("rid"):
                    request.stop()
        elif path == "/update_weight_version":
            self._label(payload["new_version"])
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
        if "mode" in payload:
            self._pause(payload["mode"])
        self._label(payload["weight_version"])
        if "mode" in payload:
            self.service.resume()
        if self.refuse_after_update_s:
            self._refuse_until = asyncio.get_running_loop().time() + self.refuse_after_update_s
        return Reply(200, {"success": True})

    def _abort_all(self) -> None:
        for request in self._running.values():
            request.stop()

    def _label(self, version: str) -> None:
        """The weights are those of ``version`` now: tokens that running requests have keep the label they had."""
        for request in self._running.values():
            request.mark(self)
        self.version = version

    def _pause(self, mode: str | None) -> None:
        self.service.pause()
        if mode == "abort":
            self._abort_all()
        if mode == "retract" and self.prefill_s:
            for request in self._running.values():
                request.compute_again(self)

    # ---- generation

    async def _generate(self, payload: dict[str, Any]) -> Reply:
        if self.remembers:
            self.requests.append(payload)
        action = self.script.popleft() if self.script else self.choose(payload)
        if isinstance(action, Status):
            return Reply(action.code, {"error": action.message})
        if isinstance(action, Raw):
            return Reply(200, action.body)
        if isinstance(action, Reset):
            raise EngineUnreachable("fake engine reset the connection")
        params = payload["sampling_params"]
        rng = random.Random(params.get("sampling_seed", payload["rid"]))
        if isinstance(action, Hang):
            count, finish, hangs = 0, "stop", True
        else:
            count, finish = self._wanted(payload, action, rng)
            hangs = False
        entries = _entries(rng, count)
        ends = params.get("stop_token_ids") or ()
        at = next((i for i, entry in enumerate(entries) if entry[1] in ends), None) if ends else None
        if at is not None:
            entries, finish = entries[: at + 1], "stop"
        request = _Request(self, len(payload["input_ids"]), len(entries), hangs)
        self._running[payload["rid"]] = request
        self.most_running = max(self.most_running, len(self._running))
        try:
            await request.job.done
        finally:
            del self._running[payload["rid"]]
            self.service.end(request.job)
        if hangs or self.dead:
            raise EngineUnreachable("fake engine died" if self.dead else "fake engine broke a hanging request")
        request.mark(self)
        return self._reply(payload, request, entries[: request.tokens], finish)

    def _wanted(self, payload: dict[str, Any], action: Say | None, rng: random.Random) -> tuple[int, str]:
        """How many tokens the reply gets, and what ends it."""
        params = payload["sampling_params"]
        want = action.tokens if action else self.length(payload, rng)
        limit = params.get("max_new_tokens") or want
        if params.get("ignore_eos") and action is None:
            want = limit + 1
        finish = action.finish if action else ("length" if want > limit else "stop")
        return min(want, limit), finish

    def _reply(self, payload: dict[str, Any], request: _Request, entries: list[Any], finish: str) -> Reply:
        if len(entries) < request.wanted:
            finish = "abort"
            self.aborted += 1
        meta: dict[str, Any] = {
            "id": payload["rid"],
            "finish_reason": {"type": finish},
            "prompt_tokens": len(payload["input_ids"]),
            "completion_tokens": len(entries),
            "output_token_logprobs": entries,
            "weight_version": self.version,
        }
        if self.tells_spans and all(span["version"].isdigit() for span in request.spans):
            meta["weight_versions"] = request.spans
        return Reply(200, {"text": " ".join(_TEXT[e[1]] for e in entries), "meta_info": meta})


class _Request:
    """A request that runs: prefill, then tokens at even distances of service."""

    def __init__(self, engine: FakeEngine, prompt_tokens: int, wanted: int, hangs: bool) -> None:
        self.prompt_tokens = prompt_tokens
        self.wanted = wanted
        self.tokens = 0
        self.spans: list[dict[str, Any]] = []
        self._before_s = prompt_tokens * engine.prefill_s
        self.job = engine.service.begin(math.inf if hangs else self._before_s + wanted * engine.token_s)

    def stop(self) -> None:
        if not self.job.done.done():
            self.job.done.set_result(None)

    def mark(self, engine: FakeEngine) -> None:
        """What has been sampled since the last mark is of the engine's present version."""
        sampled_s = engine.service.received(self.job) - self._before_s
        tokens = int(sampled_s / engine.token_s + 1e-6) if engine.token_s else self.wanted
        tokens = min(self.wanted, max(self.tokens, tokens))
        if tokens > self.tokens:
            last = self.spans[-1] if self.spans else None
            if last is not None and last["version"] == engine.version:
                last["end"] = tokens
            else:
                self.spans.append({"version": engine.version, "start": self.tokens, "end": tokens})
            self.tokens = tokens

    def compute_again(self, engine: FakeEngine) -> None:
        """Its keys and values are lost: prompt and tokens so far have to be read again."""
        self.mark(engine)
        again_s = (self.prompt_tokens + self.tokens) * engine.prefill_s
        self._before_s += again_s
        engine.service.add_work(self.job, again_s)


_TOKENS = random.Random("tokens of fake engines")
_ENTRIES: list[list[Any]] = [[-_TOKENS.random(), _TOKENS.randrange(1, 100), None] for _ in range(4096)]
_TEXT = [str(token) for token in range(100)]


def _entries(rng: random.Random, count: int) -> list[list[Any]]:
    """So many made-up (log-prob, token, None)."""
    start = int(rng.random() * len(_ENTRIES))
    entries = _ENTRIES[start : start + count]
    while len(entries) < count:
        entries += _ENTRIES[: count - len(entries)]
    return entries


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
