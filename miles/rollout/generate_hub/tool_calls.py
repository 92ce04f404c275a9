"""The text of an assistant's turn in, the tool calls in it out: one parser for each way in which models write them.

A parser gives, in order, a `ToolCall` for each call, and a `BadCall` for what was meant as one and can't be read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class BadCall:
    """``why`` is what the model is told in the place of a result."""

    why: str


Parse = Callable[[str], list[ToolCall | BadCall]]
JSON = json.JSONDecoder()


def hermes(text: str) -> list[ToolCall | BadCall]:
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, as Hermes and Qwen write it."""
    return [_call(body) for body in re.findall(r"<tool_call>(.*?)(?:</tool_call>|\Z)", text, re.DOTALL)]


def llama3(text: str) -> list[ToolCall | BadCall]:
    """``{"name": ..., "parameters": {...}}``, alone or after ``<|python_tag|>``, several with a semicolon between."""
    body = text.partition("<|python_tag|>")[2] or text
    body = re.split(r"<\|eot_id\|>|<\|eom_id\|>", body)[0].strip()
    return [_read(value) for value in _values(body)] if body.startswith("{") else []


def mistral(text: str) -> list[ToolCall | BadCall]:
    """``[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]``."""
    body = text.partition("[TOOL_CALLS]")[2].removesuffix("</s>").strip()
    if not body:
        return []
    try:
        calls, _ = JSON.raw_decode(body)
    except ValueError as error:
        return [_bad(error)]
    return [_read(call) for call in calls] if isinstance(calls, list) else [_read(calls)]


PARSERS: dict[str, Parse] = {
    "hermes": hermes,
    "qwen": hermes,
    "qwen25": hermes,
    "qwen3": hermes,
    "llama3": llama3,
    "mistral": mistral,
}


def _call(body: str) -> ToolCall | BadCall:
    try:
        return _read(json.loads(body))
    except ValueError as error:
        return _bad(error)


def _values(text: str) -> Iterator[Any]:
    """The JSON values of a text, with semicolons between; ends with the error of what is none."""
    at = 0
    while at < len(text):
        try:
            value, at = JSON.raw_decode(text, at)
        except ValueError as error:
            yield error
            return
        yield value
        at += len(text[at:]) - len(text[at:].lstrip("; \n"))


def _read(value: Any) -> ToolCall | BadCall:
    if isinstance(value, Exception):
        return _bad(value)
    name = value.get("name") if isinstance(value, dict) else None
    arguments = (value.get("arguments", value.get("parameters", {}))) if isinstance(value, dict) else None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return BadCall("error: a tool call is an object with a name and an object of arguments")
    return ToolCall(name, arguments)


def _bad(error: Exception) -> BadCall:
    return BadCall(f"error: the tool call is no JSON: {error}")
