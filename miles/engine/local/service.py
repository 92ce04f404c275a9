"""What the server does, without HTTP: request bodies in, replies out, on one event loop over one engine."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from miles.engine.local.dialect import Dialect
from miles.engine.local.engine import Engine, PauseMode
from miles.engine.local.metrics import Counters
from miles.engine.local.model_config import ModelConfig
from miles.engine.local.sequence import Sequence
from miles.engine.local.step_thread import StepThread
from miles.errors import EngineFailed, EngineUnreachable

T = TypeVar("T")

HEALTH_REQUEST = b'{"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0}}'


class ClientGone(Exception):
    """The client disconnected before its reply was ready."""


class Service:
    """Starts the engine's thread, and belongs to the running event loop.

    ``dtype`` is that of the weights; ``description`` is what the server says of itself. Requests that bring no seed get
    one that is a function of ``seed`` and of how many there were before.
    """

    def __init__(
        self,
        engine: Engine,
        dialect: Dialect,
        config: ModelConfig,
        dtype: torch.dtype,
        description: Mapping[str, Any],
        seed: int,
    ) -> None:
        self.engine = engine
        self.config = config
        self.dtype = dtype
        self.description = description
        self._dialect = dialect
        self._loop = asyncio.get_running_loop()
        self._replies: dict[Sequence, asyncio.Future[None]] = {}
        self._paused = asyncio.Event()
        self.counters = Counters()
        self._seeds = random.Random(seed)
        self.thread = StepThread(engine, self._hand_over)

    async def generate(self, body: bytes, gone: asyncio.Task[None] | None = None) -> bytes:
        """The reply to a `/generate` body.

        Raises EngineRefused, EngineFailed, EngineUnreachable while the engine ends; ClientGone when ``gone`` ends first.
        """
        started = self._loop.time()
        request = self._dialect.parse(body)
        ids = request.input_ids
        if ids is None:
            ids = await asyncio.to_thread(self._dialect.encode, request)
        sequence = self._dialect.sequence(request, ids, self._seeds.getrandbits(63))
        await self._wait_ended(sequence, gone)
        if sequence.failure is not None:
            raise EngineFailed(sequence.failure)
        return self._dialect.reply(sequence, request.return_logprob, self._loop.time() - started)

    async def pause(self, mode: PauseMode) -> None:
        """Nothing is sampled once this returns, until `resume`."""
        await self.between_steps(lambda: self.engine.pause(mode))
        self._paused.set()

    async def resume(self) -> None:
        self._paused.clear()
        await self.between_steps(self.engine.resume)

    async def check_health(self) -> None:
        """Samples one token; while generation is paused, or where it is paused meanwhile, only asks the step thread.

        Raises what `generate` raises.
        """
        sampled = self._loop.create_task(self.generate(HEALTH_REQUEST))
        paused = self._loop.create_task(self._paused.wait())
        try:
            await asyncio.wait({sampled, paused}, return_when=asyncio.FIRST_COMPLETED)
            if sampled.done():
                await sampled
            else:
                await self.between_steps(lambda: None)
        finally:
            sampled.cancel()
            paused.cancel()

    async def between_steps(self, command: Callable[[], T]) -> T:
        """What a command returns that runs between two steps."""
        return await asyncio.wrap_future(self.thread.call(command))

    async def _wait_ended(self, sequence: Sequence, gone: asyncio.Task[None] | None) -> None:
        reply: asyncio.Future[None] = self._loop.create_future()
        self._replies[sequence] = reply
        if gone is not None:
            gone.add_done_callback(lambda _: reply.cancel())
        try:
            self.thread.post(lambda: self.engine.submit(sequence))
            await reply
        except asyncio.CancelledError:
            with contextlib.suppress(EngineUnreachable):
                self.thread.call(lambda: self.engine.abort(lambda s: s is sequence, "the client disconnected"))
            if gone is not None and gone.done():
                raise ClientGone from None
            raise
        finally:
            del self._replies[sequence]

    def _hand_over(self, ended: list[Sequence]) -> None:
        self._loop.call_soon_threadsafe(self._resolve, ended)

    def _resolve(self, ended: list[Sequence]) -> None:
        for sequence in ended:
            self.counters.count(sequence)
            reply = self._replies.get(sequence)
            if reply is not None and not reply.done():
                reply.set_result(None)
