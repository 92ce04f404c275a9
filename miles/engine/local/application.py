"""HTTP in, HTTP out (ASGI), under SGLang's names: `/generate` on a direct way, the control endpoints through FastAPI.

The direct way saves more than half of the time that a request costs outside the model. Every path stands in
docs/reference/engine-http.md.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from functools import partial
from hmac import compare_digest
from typing import Any

import orjson
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from miles import __version__
from miles.engine.local.engine import PauseMode
from miles.engine.local.fields import Fields
from miles.engine.local.metrics import prometheus
from miles.engine.local.openapi import describe_generate
from miles.engine.local.service import ClientGone, Service
from miles.engine.local.weight_endpoints import add_weight_endpoints
from miles.errors import EngineError, EngineFailed, EngineRefused

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

log = logging.getLogger(__name__)


class Application:
    """The ASGI application over a service. With an ``api_key`` whoever doesn't send it learns only whether it is healthy."""

    def __init__(self, service: Service, api_key: str | None = None) -> None:
        self._service = service
        self._authorization = None if api_key is None else f"Bearer {api_key}".encode()
        self._control = control_endpoints(service)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if not self._may(scope):
            await _answer(send, 401, _error_body("this engine needs its API key: Authorization: Bearer KEY"))
        elif scope["type"] == "http" and scope["path"] == "/generate" and scope["method"] == "POST":
            await self._generate(receive, send)
        else:
            await self._control(scope, receive, send)

    def _may(self, scope: Message) -> bool:
        if self._authorization is None or scope["path"] == "/health":
            return True
        sent = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        return compare_digest(sent, self._authorization)

    async def _generate(self, receive: Receive, send: Send) -> None:
        body = await _read_body(receive)
        if body is None:
            return
        gone = asyncio.get_running_loop().create_task(_wait_disconnect(receive))
        try:
            status, reply = 200, await self._service.generate(body, gone)
        except EngineError as error:
            status, reply = _status(error), _error_body(str(error))
        except ClientGone:
            return
        except Exception as error:  # invariant: a defect costs one request a 500 that names it, never the connection
            log.exception("a request failed")
            status, reply = 500, _error_body(f"{type(error).__name__}: {error}")
        finally:
            gone.cancel()
        await _answer(send, status, reply)


class PauseFields(Fields):
    mode: PauseMode = "abort"


class AbortFields(Fields):
    rid: str | None = None
    abort_all: bool = False


def control_endpoints(service: Service) -> FastAPI:
    """Everything but `/generate`. A refusal is a 400 with ``{"error": {"message": ...}}`` and changes nothing."""
    api = FastAPI(title="miles engine", version=__version__)
    _answer_errors(api)
    _add_description(api, service)
    _add_health(api, service)
    _add_scheduling(api, service)
    add_weight_endpoints(api, service)
    describe_generate(api)
    return api


def _add_description(api: FastAPI, service: Service) -> None:
    engine = service.engine

    @api.get("/server_info")
    @api.get("/get_server_info")
    async def server_info() -> dict[str, Any]:
        return {
            **service.description,
            "version": __version__,
            "weight_version": engine.weight_version,
            "num_running_reqs": engine.running,
            "num_queue_reqs": engine.waiting,
            "is_paused": engine.paused,
        }

    @api.get("/model_info")
    @api.get("/get_model_info")
    async def model_info() -> dict[str, Any]:
        path = service.description["model_path"]
        return {
            "model_path": path,
            "tokenizer_path": path,
            "is_generation": True,
            "weight_version": engine.weight_version,
        }

    @api.get("/get_weight_version")
    async def get_weight_version() -> dict[str, str]:
        return {"weight_version": engine.weight_version}


def _add_health(api: FastAPI, service: Service) -> None:
    @api.get("/health")
    async def health() -> Response:
        return Response(status_code=200 if service.thread.alive else 503)

    @api.get("/health_generate")
    async def health_generate() -> Response:
        """Samples one token; while generation is paused, only checks that the step thread answers."""
        await service.check_health()
        return Response(status_code=200)

    @api.get("/metrics")
    async def metrics() -> Response:
        """Prometheus text."""
        described = service.description
        text = await service.between_steps(
            lambda: prometheus(
                service.engine, service.counters, described["model_path"], described["max_total_num_tokens"]
            )
        )
        return Response(text, media_type="text/plain; version=0.0.4")


def _add_scheduling(api: FastAPI, service: Service) -> None:
    engine = service.engine

    @api.post("/pause_generation")
    async def pause_generation(fields: PauseFields | None = None) -> dict[str, str]:
        """abort: all end with what they have. retract: back to waiting, tokens kept. in_place: frozen with their KV."""
        await service.pause((fields or PauseFields()).mode)
        return {"status": "ok"}

    @api.post("/continue_generation")
    async def continue_generation() -> dict[str, str]:
        await service.resume()
        return {"status": "ok"}

    @api.post("/abort_request")
    async def abort_request(fields: AbortFields) -> dict[str, int]:
        if fields.rid is None and not fields.abort_all:
            raise EngineRefused("abort_request needs a rid, or abort_all: true")
        every, rid = fields.abort_all, fields.rid
        abort = partial(engine.abort, lambda s: every or s.rid == rid, "aborted on request")
        return {"aborted": await service.between_steps(abort)}

    @api.get("/flush_cache", operation_id="flush_cache_get")
    @api.post("/flush_cache", operation_id="flush_cache_post")
    async def flush_cache() -> dict[str, str]:
        """Succeeds when no request holds keys and values; waiting (and retracted) ones hold none."""
        running = await service.between_steps(lambda: engine.running)
        if running:
            raise EngineRefused(f"{running} requests are running; abort or retract them, or wait, then flush")
        return {"status": "ok"}


def _answer_errors(api: FastAPI) -> None:
    @api.exception_handler(EngineError)
    async def failed(_: Request, error: EngineError) -> Response:
        return _error(_status(error), str(error))

    @api.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        parts = [f"{'.'.join(str(p) for p in e['loc'])}: {e['msg']}" for e in error.errors()]
        return _error(400, "; ".join(parts))

    @api.exception_handler(HTTPException)
    async def unknown(request: Request, error: HTTPException) -> Response:
        return _error(error.status_code, f"{request.method} {request.url.path}: {error.detail}")


def _status(error: EngineError) -> int:
    """400: the request is wrong. 500: this request failed. 503: the engine is on its way out."""
    if isinstance(error, EngineRefused):
        return 400
    return 500 if isinstance(error, EngineFailed) else 503


def _error(status: int, message: str) -> Response:
    return Response(_error_body(message), status, media_type="application/json")


def _error_body(message: str) -> bytes:
    return orjson.dumps({"error": {"message": message}})


async def _answer(send: Send, status: int, body: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _read_body(receive: Receive) -> bytes | None:
    """The whole body; None where the client disconnected before that."""
    body, more = b"", True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return body


async def _wait_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
