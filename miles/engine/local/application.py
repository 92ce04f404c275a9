"""HTTP in, HTTP out (ASGI), under SGLang's names: `/generate` on a direct way, the control endpoints through FastAPI.

The direct way saves more than half of the time that a request costs outside the model.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from functools import partial
from pathlib import Path
from typing import Any

import orjson
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict
from starlette.exceptions import HTTPException

from miles import __version__
from miles.engine.local.engine import PauseMode
from miles.engine.local.service import ClientGone, Service
from miles.engine.local.weights import load_folder, map_shared
from miles.errors import EngineError, EngineFailed, EngineRefused

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

log = logging.getLogger(__name__)


class Application:
    """The ASGI application over a service."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._control = control_endpoints(service)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == "/generate" and scope["method"] == "POST":
            await self._generate(receive, send)
        else:
            await self._control(scope, receive, send)

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
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(reply)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": reply})


class Fields(BaseModel):
    """Base of control bodies: a name that isn't known is an error."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class PauseFields(Fields):
    mode: PauseMode = "abort"


class AbortFields(Fields):
    rid: str | None = None
    abort_all: bool = False


class VersionFields(Fields):
    new_version: str
    abort_all_requests: bool = False
    """SGLang aborts unless told not to; a new label alone never aborts anything here."""


class SharedMemoryFields(Fields):
    path: str
    weight_version: str


class DiskFields(Fields):
    """``flush_cache`` is accepted for SGLang's sake: no cached key or value outlives its request here."""

    model_path: str
    weight_version: str | None = None
    load_format: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False


def control_endpoints(service: Service) -> FastAPI:
    """Everything but `/generate`. A refusal is a 400 with ``{"error": {"message": ...}}`` and changes nothing."""
    api = FastAPI(title="miles engine", version=__version__)
    _answer_errors(api)
    _describe(api, service)
    _schedule(api, service)
    _publish(api, service)
    return api


def _describe(api: FastAPI, service: Service) -> None:
    engine = service.engine

    @api.get("/health")
    async def health() -> Response:
        return Response(status_code=200 if service.thread.alive else 503)

    @api.get("/health_generate")
    async def health_generate() -> Response:
        """Samples one token; while generation is paused, only checks that the step thread answers."""
        if engine.paused:
            await service.between_steps(lambda: None)
        else:
            await service.generate(b'{"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0}}')
        return Response(status_code=200)

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


def _schedule(api: FastAPI, service: Service) -> None:
    engine = service.engine

    @api.post("/pause_generation")
    async def pause_generation(fields: PauseFields | None = None) -> dict[str, str]:
        """abort: all end with what they have. retract: back to waiting, tokens kept. in_place: frozen with their KV."""
        mode = (fields or PauseFields()).mode
        await service.between_steps(lambda: engine.pause(mode))
        return {"status": "ok"}

    @api.post("/continue_generation")
    async def continue_generation() -> dict[str, str]:
        await service.between_steps(engine.resume)
        return {"status": "ok"}

    @api.post("/abort_request")
    async def abort_request(fields: AbortFields) -> dict[str, int]:
        if fields.rid is None and not fields.abort_all:
            raise EngineRefused("abort_request needs a rid, or abort_all: true")
        every, rid = fields.abort_all, fields.rid
        abort = partial(engine.abort, lambda s: every or s.rid == rid, "aborted on request")
        return {"aborted": await service.between_steps(abort)}

    @api.api_route("/flush_cache", methods=["GET", "POST"])
    async def flush_cache() -> dict[str, str]:
        """Succeeds when no request holds keys and values; waiting (and retracted) ones hold none."""
        running = await service.between_steps(lambda: engine.running)
        if running:
            raise EngineRefused(f"{running} requests are running; abort or retract them, or wait, then flush")
        return {"status": "ok"}


def _publish(api: FastAPI, service: Service) -> None:
    engine = service.engine

    @api.post("/update_weight_version")
    async def update_weight_version(fields: VersionFields) -> dict[str, Any]:
        def update() -> None:
            if fields.abort_all_requests:
                engine.abort(lambda _: True, f"aborted by the update to version {fields.new_version!r}")
            engine.set_version(fields.new_version)

        await service.between_steps(update)
        return {"success": True, "new_version": fields.new_version}

    @api.post("/update_weights_from_shared_memory")
    async def update_weights_from_shared_memory(fields: SharedMemoryFields) -> dict[str, Any]:
        """Adopts a segment (`miles.engine.segment`) where it lies; the reply says that the former one is unmapped."""
        read = partial(map_shared, Path(fields.path), service.config, service.dtype)
        await service.update_weights(read, fields.weight_version)
        return {"success": True, "weight_version": fields.weight_version}

    @api.post("/update_weights_from_disk")
    async def update_weights_from_disk(fields: DiskFields) -> dict[str, Any]:
        if fields.load_format not in (None, "auto", "safetensors"):
            raise EngineRefused(f"load_format {fields.load_format!r} is not supported; auto and safetensors are")
        if fields.abort_all_requests:
            await service.between_steps(partial(engine.abort, lambda _: True, "aborted by an update of the weights"))
        read = partial(load_folder, Path(fields.model_path), service.config, service.dtype)
        await service.update_weights(read, fields.weight_version)
        return {"success": True, "weight_version": engine.weight_version}


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
