"""The control endpoints that bring new weights, under SGLang's names. A refusal is a 400 and changes nothing."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI
from pydantic import Field

from miles.engine.local.engine import PauseMode
from miles.engine.local.fields import Fields
from miles.engine.local.incoming import check_bucket, decode
from miles.engine.local.service import Service
from miles.engine.local.updates import Updates
from miles.engine.local.weights import load_folder, map_shared
from miles.errors import EngineRefused

Count = Annotated[int, Field(ge=0, le=2**31)]


class VersionFields(Fields):
    new_version: str
    abort_all_requests: bool = False
    """SGLang aborts unless told not to; a new label alone never aborts anything here."""


class SharedMemoryFields(Fields):
    """``mode``: what running requests do at the swap; left out: nothing, they go on with their keys and values."""

    path: str
    weight_version: str
    mode: PauseMode | None = None


class UpdateFields(Fields):
    """``flush_cache`` and ``selector`` are accepted for SGLang's sake: there is one model, and its cache follows it."""

    weight_version: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False
    selector: Any = None


class DiskFields(UpdateFields):
    model_path: str
    load_format: str | None = None


class TensorFields(UpdateFields):
    """One base64 text, or a list with one for each tensor-parallel rank, of which there is one here."""

    serialized_named_tensors: str | list[str]
    load_format: str | None = None


class DistributedFields(UpdateFields):
    names: list[str]
    dtypes: list[str]
    shapes: list[list[Count]]
    group_name: str = "weight_update_group"
    load_format: None = None


class JoinFields(Fields):
    master_address: str
    master_port: Annotated[int, Field(ge=1, le=65535)]
    rank_offset: Annotated[int, Field(ge=1, le=65535)]
    world_size: Annotated[int, Field(ge=2, le=65536)]
    group_name: str = "weight_update_group"
    backend: str = "gloo"


class LeaveFields(Fields):
    group_name: str = "weight_update_group"


class BeginFields(Fields):
    selector: Any = None


def add_weight_endpoints(api: FastAPI, service: Service) -> None:
    """Enters them all."""
    updates = Updates(service)
    _add_whole(api, service, updates)
    _add_parts(api, service, updates)
    _add_groups(api, updates)


def _add_whole(api: FastAPI, service: Service, updates: Updates) -> None:
    engine = service.engine

    @api.post("/update_weight_version")
    async def update_weight_version(fields: VersionFields) -> dict[str, Any]:
        await _abort_if(service, fields.abort_all_requests)
        await updates.relabel(fields.new_version)
        return {"success": True, "new_version": fields.new_version}

    @api.post("/update_weights_from_shared_memory")
    async def update_weights_from_shared_memory(fields: SharedMemoryFields) -> dict[str, Any]:
        """Adopts a segment (`miles.engine.segment`) where it lies; the reply says that the former one is unmapped."""
        read = partial(map_shared, Path(fields.path), service.config, service.dtype)
        await updates.load(read, fields.weight_version, fields.mode)
        return {"success": True, "weight_version": fields.weight_version}

    @api.post("/update_weights_from_disk")
    async def update_weights_from_disk(fields: DiskFields) -> dict[str, Any]:
        if fields.load_format not in (None, "auto", "safetensors"):
            raise EngineRefused(f"load_format {fields.load_format!r} is not supported; auto and safetensors are")
        await _abort_if(service, fields.abort_all_requests)
        read = partial(load_folder, Path(fields.model_path), service.config, service.dtype)
        await updates.load(read, fields.weight_version)
        return {"success": True, "weight_version": engine.weight_version}


def _add_parts(api: FastAPI, service: Service, updates: Updates) -> None:
    @api.post("/begin_weight_update")
    async def begin_weight_update(fields: BeginFields | None = None) -> dict[str, Any]:
        """Buckets and a label that follow are kept aside until `/end_weight_update`."""
        await updates.begin()
        return {"success": True}

    @api.post("/end_weight_update")
    async def end_weight_update() -> dict[str, Any]:
        """Adopts the buckets and the label, if every tensor has arrived."""
        await updates.end()
        return {"success": True, "weight_version": service.engine.weight_version}

    @api.post("/update_weights_from_tensor")
    async def update_weights_from_tensor(fields: TensorFields) -> dict[str, Any]:
        """Tensors in the body, as base64: a safetensors file (``load_format`` "safetensors"), or pickled by value."""
        sent = fields.serialized_named_tensors
        payloads = [sent] if isinstance(sent, str) else sent
        if len(payloads) != 1:
            raise EngineRefused(
                f"serialized_named_tensors has {len(payloads)} entries; one is needed: there is one rank"
            )
        await _abort_if(service, fields.abort_all_requests)
        await updates.add(partial(decode, payloads[0], fields.load_format), fields.weight_version)
        return {"success": True, "message": ""}

    @api.post("/update_weights_from_distributed")
    async def update_weights_from_distributed(fields: DistributedFields) -> dict[str, Any]:
        """A bucket that rank 0 of a group broadcasts, in this order."""
        check_bucket(service.config, fields.names, fields.dtypes, fields.shapes)
        await _abort_if(service, fields.abort_all_requests)
        await updates.receive(fields.group_name, fields.names, fields.dtypes, fields.shapes, fields.weight_version)
        return {"success": True, "message": ""}


def _add_groups(api: FastAPI, updates: Updates) -> None:
    @api.post("/init_weights_update_group")
    async def init_weights_update_group(fields: JoinFields) -> dict[str, Any]:
        """Meets the others at rank 0's address; rank 0 is the trainer."""
        if fields.backend != "gloo":
            raise EngineRefused(f"backend {fields.backend!r} is not supported on this CPU engine; gloo is")
        if fields.rank_offset >= fields.world_size:
            raise EngineRefused(f"rank_offset {fields.rank_offset} is no rank of a group of {fields.world_size}")
        await updates.join(
            name=fields.group_name, address=fields.master_address, port=fields.master_port,
            rank=fields.rank_offset, world_size=fields.world_size, backend=fields.backend,
        )  # fmt: skip
        return {"success": True, "message": ""}

    @api.post("/destroy_weights_update_group")
    async def destroy_weights_update_group(fields: LeaveFields) -> dict[str, Any]:
        if not await updates.leave(fields.group_name):
            raise EngineRefused(f"group {fields.group_name!r} is unknown")
        return {"success": True, "message": ""}


async def _abort_if(service: Service, wanted: bool) -> None:
    if wanted:
        abort = partial(service.engine.abort, lambda _: True, "aborted by an update of the weights")
        await service.between_steps(abort)
