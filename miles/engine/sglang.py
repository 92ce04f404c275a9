"""SGLang: settings and a port in, the way to start its server out; and what its protocol needs to be safe.

The client speaks SGLang's own protocol, so little is adapted: no label and no weights ever abort running requests, which the
server does unless it is told not to, and a server that is too old for ``/model_info`` tells its label elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from miles.config import Settings
from miles.engine.launch import Launch, interpreter
from miles.engine.wire import Reply, Transport

ENV = {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false"}
"""A health check samples no token: it would wait, and fail, while generation is paused for new weights."""


def launch(settings: Settings, *, model: str, port: int, extra: Sequence[str] = ()) -> Launch:
    """Serves ``model`` on 127.0.0.1:``port``; ``extra`` are more arguments, which win over those before them."""
    sampling, engine = settings.sampling, settings.engine
    argv = [
        interpreter(engine), "-m", "sglang.launch_server",
        "--model-path", model,
        "--host", "127.0.0.1",
        "--port", str(port),
        "--tp-size", str(engine.rollout_num_gpus_per_engine),
        "--dtype", settings.model.dtype,
        "--random-seed", str(settings.data.rollout_seed),
        "--max-running-requests", str(engine.sglang_max_running_requests),
        "--skip-server-warmup",
    ]  # fmt: skip
    if engine.sglang_max_total_tokens is not None:
        argv += ["--max-total-tokens", str(engine.sglang_max_total_tokens)]
    if sampling.rollout_max_context_len is not None:
        argv += ["--context-length", str(sampling.rollout_max_context_len)]
    return Launch((*argv, *extra), ENV)


class SglangTransport:
    """A `Transport` to SGLang servers."""

    def __init__(self, inner: Transport) -> None:
        self._inner = inner

    async def request(self, method: str, url: str, payload: Any = None) -> Reply:
        path = urlsplit(url).path
        if path.startswith(("/update_weight_version", "/update_weights_from_")):
            payload = {"abort_all_requests": False} | (payload or {})
        reply = await self._inner.request(method, url, payload)
        if path == "/model_info" and reply.status == 404:
            return await self._inner.request(method, url.removesuffix(path) + "/get_weight_version")
        return reply

    async def close(self) -> None:
        await self._inner.close()
