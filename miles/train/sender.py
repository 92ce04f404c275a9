"""Published weights held by trainer rank 0, for whoever asks: into process groups with engines, bucket by bucket.

It lives on threads of its own, so that engines are served, late ones too, while the trainer goes on. `miles.weights` drives
it over HTTP as it drives the engines; every reply is JSON, and a refusal is a 400 with ``{"error": ...}``.

    POST TOKEN/buckets    {version}                     the names, dtypes and shapes of each bucket
    POST TOKEN/open       {group_name, world_size}      the address and port where the group meets; meeting goes on
    POST TOKEN/send       {group_name, version, bucket} after the broadcast
    POST TOKEN/close      {group_name}
"""

from __future__ import annotations

import json
import secrets
import socket
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from miles.engine.weight_group import WeightGroup
from miles.errors import EngineError, EngineRefused
from miles.types import Weights

GROUP_TIMEOUT_S = 30.0
"""Seconds that a group may take to meet, and one bucket to be sent."""

Bucket = Mapping[str, Tensor]


def gather_buckets(tensors: Mapping[str, Tensor], dtype: torch.dtype, most_bytes: int) -> list[dict[str, Tensor]]:
    """Whole tensors on the CPU of rank 0, sharded ones in ``dtype``, in buckets of up to ``most_bytes``; elsewhere nothing.

    All ranks take part. Tensors are gathered one by one, so that a device holds one whole tensor at a time.
    """
    buckets: list[dict[str, Tensor]] = []
    held = most_bytes
    for name, tensor in tensors.items():
        whole = tensor.to(dtype).full_tensor() if isinstance(tensor, DTensor) else tensor  # type: ignore[attr-defined]
        if dist.get_rank() == 0:
            own = whole.to("cpu", copy=True)
            if held + own.nbytes > most_bytes:
                buckets.append({})
                held = 0
            buckets[-1][name] = own
            held += own.nbytes
    return buckets


@dataclass(frozen=True)
class _Held:
    version: int
    buckets: tuple[Bucket, ...]


class WeightSender:
    """Holds the newest weights, and serves them on ``host``. ``device``: where the groups' tensors have to be."""

    def __init__(self, host: str, device: torch.device) -> None:
        self._host = host
        self._device = device
        self._backend = "nccl" if device.type == "cuda" else "gloo"
        self._held: _Held | None = None
        self._groups: dict[str, Future[WeightGroup]] = {}
        token = secrets.token_urlsafe(16)
        self._server = ThreadingHTTPServer((host, 0), _handler(f"/{token}", self._calls()))
        self._server.daemon_threads = True
        self.address = f"http://{host}:{self._server.server_address[1]}/{token}"
        threading.Thread(target=self._server.serve_forever, name="weight-sender", daemon=True).start()

    def hold(self, version: int, buckets: list[dict[str, Tensor]]) -> Weights:
        """Serves these from now on; what is being sent goes on with what it began with."""
        self._held = _Held(version, tuple(buckets))
        return Weights(version, "broadcast", self.address)

    def close(self) -> None:
        """Ends the server and the groups. Twice is fine."""
        self._server.shutdown()
        self._server.server_close()
        for name in list(self._groups):
            self._close(name)

    # ---- calls, each on a thread of its own

    def _calls(self) -> dict[str, Callable[..., Any]]:
        return {"buckets": self._buckets, "open": self._open, "send": self._send, "close": self._close}

    def _buckets(self, version: int) -> dict[str, Any]:
        return {"buckets": [_description(bucket) for bucket in self._of(version).buckets]}

    def _open(self, group_name: str, world_size: int) -> dict[str, Any]:
        """Says where the group meets before anybody has come; `_send` waits for it."""
        self._close(group_name)
        with socket.socket() as probe:
            probe.bind((self._host, 0))
            port = int(probe.getsockname()[1])
        future: Future[WeightGroup] = Future()
        self._groups[group_name] = future

        def meet() -> None:
            try:
                self._enter_device()
                future.set_result(
                    WeightGroup(
                        address=self._host, port=port, rank=0, world_size=world_size, name=group_name,
                        backend=self._backend, timeout_s=GROUP_TIMEOUT_S,
                    )
                )  # fmt: skip
            except EngineError as error:
                future.set_exception(error)

        threading.Thread(target=meet, name=f"meet-{group_name}", daemon=True).start()
        return {"master_address": self._host, "master_port": port, "backend": self._backend}

    def _send(self, group_name: str, version: int, bucket: int) -> dict[str, Any]:
        tensors = list(self._of(version).buckets[bucket].values())
        future = self._groups.get(group_name)
        if future is None:
            raise EngineRefused(f"group {group_name!r} is unknown")
        group = future.result(2 * GROUP_TIMEOUT_S)
        self._enter_device()
        group.broadcast([t.to(self._device) for t in tensors])
        return {}

    def _close(self, group_name: str) -> dict[str, Any]:
        """Leaves a group, which ends what waits in it. One that still meets is left when it has met."""
        future = self._groups.pop(group_name, None)
        if future is not None:
            future.add_done_callback(lambda met: None if met.exception() else met.result().close())
        return {}

    def _of(self, version: int) -> _Held:
        held = self._held
        if held is None or held.version != version:
            raise EngineRefused(f"version {version} is not held any more; {held.version if held else 'none'} is")
        return held

    def _enter_device(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)


def _description(bucket: Bucket) -> dict[str, Any]:
    tensors = bucket.values()
    return {
        "names": list(bucket),
        "dtypes": [str(t.dtype).removeprefix("torch.") for t in tensors],
        "shapes": [list(t.shape) for t in tensors],
    }


def _handler(prefix: str, calls: Mapping[str, Callable[..., Any]]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        """Whoever doesn't know the token gets a 404."""

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            call = calls.get(self.path.removeprefix(prefix + "/")) if self.path.startswith(prefix + "/") else None
            try:
                status, reply = (
                    (404, {"error": "not found"}) if call is None else (200, call(**json.loads(body or "{}")))
                )
            except EngineRefused as error:
                status, reply = 400, {"error": str(error)}
            except Exception as error:  # invariant: the publisher learns why nothing was sent, and the thread ends well
                status, reply = 500, {"error": f"{type(error).__name__}: {error}"}
            data = json.dumps(reply).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *given: Any) -> None:
            """Nothing: stderr is the run's."""

    return Handler
