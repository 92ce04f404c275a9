"""A prompt, a reply and its label go to a reward server, the reward that it answers with comes out.

    POST --rm-url  {"prompt": ..., "response": "...", "label": ...}   ->   0.5  or  {"score": 0.5, ...}  or  null

who waits   for what                         who wakes it
score()     one of ``concurrency`` requests  whoever has its reply
            the next try                     the clock
"""

from __future__ import annotations

import asyncio
from typing import Any

from miles.engine.client import backoff
from miles.engine.http import HttpTransport
from miles.engine.wire import Reply, Transport
from miles.errors import EngineUnreachable, RewardFailed
from miles.rollout.rm_hub.rm_types import Reward, as_reward


class RemoteRewards:
    """Asks reward servers through one transport, bound to the loop that first uses it.

    A try may take ``timeout_s`` seconds. One that breaks, takes longer or is answered 5xx is repeated up to ``retries``
    times, with waits that double; a 4xx never is.
    """

    def __init__(self, *, concurrency: int, timeout_s: float, retries: int, transport: Transport | None = None) -> None:
        self._transport = transport or HttpTransport()
        self._free = asyncio.Semaphore(concurrency)
        self._timeout_s = timeout_s
        self._retries = retries

    async def score(self, url: str, prompt: Any, response: str, label: str | None) -> Reward:
        """Raises RewardFailed where the server gives no reward."""
        payload = {"prompt": prompt, "response": response, "label": label}
        problem = ""
        for attempt, delay in zip(range(self._retries + 1), backoff(), strict=False):
            try:
                async with self._free, asyncio.timeout(self._timeout_s):
                    reply = await self._transport.request("POST", url, payload)
            except EngineUnreachable as error:
                problem = str(error)
            except TimeoutError:
                problem = f"no answer within {self._timeout_s:g} s (--rm-timeout-s)"
            else:
                if reply.status < 500:
                    return _reward(url, reply)
                problem = f"it answered {_shown(reply)}"
            if attempt < self._retries:
                await asyncio.sleep(delay)
        raise RewardFailed(f"--rm-url {url}: {self._retries + 1} tries failed; the last one: {problem}")

    async def close(self) -> None:
        await self._transport.close()


def _reward(url: str, reply: Reply) -> Reward:
    if reply.status != 200:
        raise RewardFailed(f"--rm-url {url} answered {_shown(reply)}")
    try:
        return as_reward(reply.body)
    except ValueError as error:
        raise RewardFailed(f"--rm-url {url} answered {_shown(reply)}: {error}") from None


def _shown(reply: Reply) -> str:
    return f"{reply.status}: {str(reply.body)[:500]}"
