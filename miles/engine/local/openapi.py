"""What `/generate` takes, as OpenAPI has it: that endpoint goes past FastAPI, which therefore can't describe it."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from fastapi import FastAPI

from miles.engine.local.sampling_params import SamplingParams

JSON_OF = {
    "int": {"type": "integer"},
    "float": {"type": "number"},
    "bool": {"type": "boolean"},
    "int | None": {"type": ["integer", "null"]},
    "float | None": {"type": ["number", "null"]},
    "tuple[str, ...]": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
    "tuple[int, ...]": {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"type": "integer"}}]},
}


def describe_generate(api: FastAPI) -> None:
    """Adds the path to the application's schema. Called once all other paths are there."""
    schema = api.openapi()
    schema["paths"]["/generate"] = {
        "post": {
            "summary": "Generate",
            "operationId": "generate",
            "requestBody": {"required": True, "content": {"application/json": {"schema": _request()}}},
            "responses": {"200": {"description": "text, output_ids and meta_info"}, "400": {"description": "refused"}},
        }
    }


def _request() -> dict[str, Any]:
    sampling = {f.name: JSON_OF[str(f.type)] for f in fields(SamplingParams)}
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": {
            "rid": {"type": ["string", "null"]},
            "input_ids": {"type": ["array", "null"], "items": {"type": "integer"}},
            "text": {"type": ["string", "null"]},
            "sampling_params": {"type": "object", "properties": sampling, "additionalProperties": False},
            "return_logprob": {"type": ["boolean", "null"]},
            "stream": {"type": ["boolean", "null"], "enum": [False, None]},
        },
    }
