"""One request to an engine in, its status and JSON body out: the port that real HTTP and the shipped fake stand behind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Reply:
    """An HTTP reply: ``body`` is decoded JSON, or text where it is none."""

    status: int
    body: Any


class Transport(Protocol):
    """Carries requests to engines. Raises `EngineUnreachable` where no reply came; time limits are the caller's."""

    async def request(self, method: str, url: str, payload: Any = None) -> Reply: ...

    async def close(self) -> None: ...
