"""A server's address in, a table of what asynchronous RL needs of it out: `python -m miles.engine.conformance URL`.

    health                    answers 200
    tokens                    one finite log-prob for each sampled id, as many as asked for
    label                     tells the version of its weights
    stop                      ends at a stop token, which is the last id
    abort                     an aborted request comes back at once, its tokens and log-probs still in step
    pause retract, in_place   nothing ends while paused; afterwards everything goes on to its end
    relabel                   a new label aborts nothing that runs
    update                    new weights from a disk abort nothing that runs, and the label follows them

Exit code 0: safe, 1: not safe, 2: nothing failed, but not everything could be tested (requests too short to be caught
running, or longer than the server's context). For a server that nobody trains with: labels change on the way, and are put
back; ``update`` loads the weights that the server already has.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from miles.engine.backends import BACKENDS
from miles.engine.client import EngineClient, Generation, backoff, version_of
from miles.engine.http import HttpTransport
from miles.engine.router import RoutingTable
from miles.engine.wire import Transport
from miles.errors import EngineError, EngineRefused, raising_first_cause

PROMPT = [1, 2, 3, 4]
REQUESTS = 4
TOLD = 300
"""A version label that no run of the server had."""


class NotSafe(Exception):
    """What the server did that asynchronous RL can't live with."""


class NotTested(Exception):
    """Why a check proves nothing about the server, this time."""


@dataclass(frozen=True)
class Verdict:
    """``passed`` None: not tested."""

    check: str
    passed: bool | None
    why: str = ""

    def __str__(self) -> str:
        word = {True: "ok", False: "FAILED", None: "-"}[self.passed]
        why = f"not tested: {self.why}" if self.passed is None else self.why
        return f"{word:<8}{self.check:<18}{why}".rstrip()


class Conformance:
    """Asks one server. ``tokens``: length of a long request, long enough to be caught running ``head_start_s`` later."""

    def __init__(
        self,
        url: str,
        transport: Transport,
        *,
        model_path: str | None = None,
        tokens: int = 256,
        head_start_s: float = 0.1,
        timeout_s: float = 120.0,
    ) -> None:
        self._url = url
        self._client = EngineClient(RoutingTable(engine_wait_s=timeout_s), transport)
        self._client.table.add_fixed(url)
        self._model_path = model_path
        self._tokens = tokens
        self._head_start_s = head_start_s
        self._timeout_s = timeout_s
        self._sent = 0

    async def run(self) -> list[Verdict]:
        """Every verdict, in order. A server that doesn't answer at all gets one."""
        checks: dict[str, Callable[[], Awaitable[None]]] = {
            "health": self._health,
            "tokens": self._token_ids,
            "label": self._label,
            "stop": self._stop,
            "abort": self._abort,
            "pause retract": lambda: self._pause("retract"),
            "pause in_place": lambda: self._pause("in_place"),
            "relabel": self._relabel,
            "update": self._update,
        }
        verdicts: list[Verdict] = []
        for name, check in checks.items():
            verdicts.append(await self._judge(name, check))
            if name == "health" and not verdicts[-1].passed:
                break
        await self._client.close()
        return verdicts

    async def _judge(self, name: str, check: Callable[[], Awaitable[None]]) -> Verdict:
        try:
            with raising_first_cause():
                async with asyncio.timeout(self._timeout_s):
                    await check()
        except NotTested as error:
            return Verdict(name, None, str(error))
        except (NotSafe, EngineError) as error:
            return Verdict(name, False, str(error))
        except TimeoutError:
            return Verdict(name, False, f"no end within {self._timeout_s:g} s")
        return Verdict(name, True)

    # ---- what is asked of the server

    async def _health(self) -> None:
        await self._control("/health")

    async def _token_ids(self) -> None:
        reply = await self._generate(16)
        if len(reply.ids) != 16 or reply.finish != "length":
            raise NotSafe(f"16 tokens with ignore_eos were asked for; {len(reply.ids)} came, finish {reply.finish}")

    async def _label(self) -> None:
        label = (await self._control("/model_info")).get("weight_version")
        if not isinstance(label, str):
            raise NotSafe(f"/model_info has weight_version {label!r}; a text is needed")

    async def _stop(self) -> None:
        params: dict[str, Any] = {"temperature": 0.0, "sampling_seed": 7}
        free = await self._generate(16, **params)
        end = free.ids[8]
        stopped = await self._generate(16, stop_token_ids=[end], **params)
        expected = free.ids[: free.ids.index(end) + 1]
        if stopped.ids != expected or stopped.finish != "stop":
            raise NotSafe(f"ids {expected} should end at {end}; they are {stopped.ids}, finish {stopped.finish}")

    async def _abort(self) -> None:
        request = asyncio.create_task(self._long_request("to-be-aborted"))
        for delay in backoff(self._head_start_s):
            await self._control("/abort_request", {"rid": "to-be-aborted"})
            if (await asyncio.wait({request}, timeout=delay))[0]:
                break
        reply = request.result()
        if reply.finish != "abort":
            raise NotSafe(f"an aborted request ended with {reply.finish} after {len(reply.ids)} tokens")

    async def _pause(self, mode: str) -> None:
        async with asyncio.TaskGroup() as tasks:
            running = await self._start_requests(tasks)
            await self._control("/pause_generation", {"mode": mode})
            before = sum(r.done() for r in running)
            await asyncio.wait(running, timeout=self._head_start_s)
            ended = sum(r.done() for r in running) - before
            await self._control("/continue_generation", {})
        if ended:
            raise NotSafe(f"{ended} of {REQUESTS} requests ended while generation was paused")
        _all_went_on(running, self._tokens)

    async def _relabel(self) -> None:
        old = await self._told_label()
        async with asyncio.TaskGroup() as tasks:
            running = await self._start_requests(tasks)
            await self._set_label(str(TOLD))
        new = await self._told_label()
        await self._set_label(old)
        _all_went_on(running, self._tokens)
        if version_of(new) != TOLD:
            raise NotSafe(f"the label is {new!r} after it was set to {TOLD}")

    async def _update(self) -> None:
        told = await self._control("/model_info")
        path = self._model_path or told.get("model_path")
        if path is None:
            raise NotSafe("the server doesn't tell its model_path; give --model-path")
        payload = {"model_path": path, "weight_version": str(TOLD + 1), "flush_cache": True}
        async with asyncio.TaskGroup() as tasks:
            running = await self._start_requests(tasks)
            await self._control("/pause_generation", {"mode": "retract"})
            try:
                await self._control("/update_weights_from_disk", payload)
            finally:
                await self._control("/continue_generation", {})
        new = await self._told_label()
        await self._set_label(str(told.get("weight_version")))
        _all_went_on(running, self._tokens)
        if version_of(new) != TOLD + 1:
            raise NotSafe(f"the label is {new!r} after weights labelled {TOLD + 1} were loaded")

    # ---- requests

    async def _start_requests(self, tasks: asyncio.TaskGroup) -> list[asyncio.Task[Generation]]:
        """Long requests, a head start after they were sent. Raises NotTested when one has ended by then."""
        running = [tasks.create_task(self._long_request()) for _ in range(REQUESTS)]
        ended, _ = await asyncio.wait(running, timeout=self._head_start_s, return_when=asyncio.FIRST_COMPLETED)
        if ended and not any(r.exception() for r in ended):
            raise NotTested(f"{self._tokens} tokens took less than {self._head_start_s:g} s; give more --tokens")
        return running

    async def _long_request(self, request_id: str | None = None) -> Generation:
        try:
            return await self._generate(self._tokens, request_id)
        except EngineRefused as error:
            raise NotTested(f"it refuses {self._tokens} new tokens; give fewer --tokens ({error})") from error

    async def _generate(self, tokens: int, request_id: str | None = None, **params: Any) -> Generation:
        self._sent += 1
        wanted = {"temperature": 1.0, "max_new_tokens": tokens, "ignore_eos": True} | params
        rid = request_id or f"conformance-{self._sent}"
        return await self._client.generate(PROMPT, wanted, request_id=rid, submit_version=None)

    async def _told_label(self) -> object:
        return (await self._control("/model_info")).get("weight_version")

    async def _set_label(self, label: object) -> None:
        await self._control("/update_weight_version", {"new_version": str(label), "abort_all_requests": False})

    async def _control(self, path: str, payload: object = None) -> dict[str, object]:
        body = await self._client.control(self._url, path, payload, timeout_s=self._timeout_s)
        return body if isinstance(body, dict) else {}


def _all_went_on(running: Sequence[asyncio.Task[Generation]], tokens: int) -> None:
    ends = [(r.result().finish, len(r.result().ids)) for r in running]
    lost = [end for end in ends if end != ("length", tokens)]
    if lost:
        finish, count = lost[0]
        raise NotSafe(f"{len(lost)} of {len(ends)} requests were cut off: {finish} after {count} of {tokens} tokens")


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the table. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m miles.engine.conformance", description="is it safe for async RL?")
    parser.add_argument("url", help="address of the server, for example http://127.0.0.1:30000")
    parser.add_argument("--backend", default="sglang", choices=sorted(BACKENDS), help="its protocol (%(default)s)")
    parser.add_argument("--model-path", help="folder with the weights that it serves; else what it tells")
    parser.add_argument("--tokens", type=int, default=256, help="length of a long request (%(default)s)")
    given = parser.parse_args(argv)
    transport = BACKENDS[given.backend].adapt(HttpTransport())
    suite = Conformance(given.url.rstrip("/"), transport, model_path=given.model_path, tokens=given.tokens)
    verdicts = asyncio.run(suite.run())
    for verdict in verdicts:
        sys.stdout.write(f"{verdict}\n")
    failed = any(v.passed is False for v in verdicts)
    open_ = [v.check for v in verdicts if v.passed is None]
    sys.stdout.write(
        f"{given.url} may be safe for asynchronous RL; not tested: {', '.join(open_)}\n"
        if open_ and not failed
        else f"{given.url} is {'NOT ' if failed else ''}safe for asynchronous RL\n"
    )
    return 1 if failed else 2 if open_ else 0


if __name__ == "__main__":
    sys.exit(main())
