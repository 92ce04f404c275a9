"""The values of one row in, a checked `Row` out: the same rules for every file format.

What a row may hold:

- the prompt: text, or a list of chat messages, each an object with a "role"; not empty. The content of a message is text
  or a list of text parts; other parts, such as images, are an error, because nothing here could send them;
- the label, where a label key is set: text, or a number, which becomes its decimal text (5 becomes "5", 0.50 becomes
  "0.5"). Anything else (missing, null, "", true, a list, an object, NaN) is an error, because no answer could ever
  match it and its reward would silently be 0;
- metadata: an object, or its JSON text; missing or null means an empty one;
- tools: a list of objects, or its JSON text; they become ``metadata["tools"]``. Missing or null means none.

Whatever can't be used is a `DataError` that starts with ``file:line`` (in Parquet files the row; both count from 1).
"""

from __future__ import annotations

import json
import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NoReturn, overload

from miles.config import Settings
from miles.config.eval_config import EvalDataset
from miles.data.messages import message_problem
from miles.errors import DataError
from miles.types import Message

CHECKED_ROWS = 50_000
"""Rows that are read when a run starts; those after them are read when they are drawn."""


@dataclass(frozen=True)
class RowKeys:
    """Under which keys a row holds what; ``label`` None: rows have no label."""

    input: str = "input"
    label: str | None = None
    metadata: str = "metadata"
    tools: str = "tools"

    @classmethod
    def of_training(cls, settings: Settings) -> RowKeys:
        data = settings.data
        return cls(data.input_key, data.label_key, data.metadata_key, data.tool_key)

    @classmethod
    def of_evaluation(cls, settings: Settings, dataset: EvalDataset) -> RowKeys:
        """What a set leaves unset is as in evaluation, and what that leaves unset as in training."""
        own, data = settings.eval, settings.data
        return cls(
            dataset.input_key or own.eval_input_key or data.input_key,
            dataset.label_key or own.eval_label_key or data.label_key,
            dataset.metadata_key or data.metadata_key,
            dataset.tool_key or own.eval_tool_key or data.tool_key,
        )

    def names(self) -> list[str]:
        return [name for name in (self.input, self.label, self.metadata, self.tools) if name is not None]


DEFAULT_KEYS = RowKeys()


@dataclass(frozen=True)
class Row:
    """One usable row. ``line`` counts from 1."""

    line: int
    prompt: str | list[Message]
    label: str | None
    metadata: dict[str, Any]
    path: str = ""

    @property
    def place(self) -> str:
        return f"{self.path}:{self.line}"


def check_rows(rows: Sequence[Row]) -> None:
    """Reads the first rows and the last one (a download that broke off is cut there). Raises DataError."""
    for _ in islice(rows, CHECKED_ROWS):
        pass
    rows[len(rows) - 1]


class Rows(Sequence[Row]):
    """Rows that are read one at a time, when they are asked for: a subclass has ``__len__`` and `row`."""

    @abstractmethod
    def row(self, i: int) -> Row:
        """The row at ``i``, ``0 <= i < len(self)``. Raises DataError where it can't be used."""

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return self.row(range(len(self))[index])


@dataclass(frozen=True)
class RowParser:
    """Checks the rows of the file ``path``. ``names`` are what a file with columns calls them."""

    path: str
    keys: RowKeys
    names: Sequence[str] = ()

    def parse(self, values: dict[str, Any], line: int) -> Row:
        """Raises DataError where the values can't be used."""
        metadata = self._metadata(values, line)
        tools = self._tools(values, line)
        return Row(
            line=line,
            prompt=self._prompt(values, line),
            label=self._label(values, line),
            metadata=metadata | {"tools": tools} if tools else metadata,
            path=self.path,
        )

    def refuse(self, line: int, why: str) -> NoReturn:
        raise DataError(f"{self.path}:{line}: {why}")

    def _prompt(self, values: dict[str, Any], line: int) -> str | list[Message]:
        key = self.keys.input
        if key not in values:
            self.refuse(line, f'has no prompt key "{key}"; its keys are {self._known(values)} (--input-key)')
        prompt = values[key]
        if isinstance(prompt, str) and prompt:
            return prompt
        if isinstance(prompt, list) and prompt:
            for number, message in enumerate(prompt, start=1):
                if problem := message_problem(message):
                    self.refuse(line, f'prompt "{key}", message {number} {problem}')
            return prompt
        what = "is empty" if prompt in ("", []) else f"is {kind(prompt)}"
        self.refuse(line, f'prompt "{key}" {what}; text or a list of messages works')

    def _label(self, values: dict[str, Any], line: int) -> str | None:
        key = self.keys.label
        if key is None:
            return None
        if key not in values:
            self.refuse(line, f'has no label key "{key}"; its keys are {self._known(values)} (--label-key)')
        label = values[key]
        if isinstance(label, str) and label.strip():
            return label
        if isinstance(label, int | float) and not isinstance(label, bool) and math.isfinite(label):
            return str(label)
        what = "is empty" if isinstance(label, str) else f"is {kind(label)}"
        self.refuse(line, f'label "{key}" {what}; text or a finite number works, other objects go into metadata')

    def _metadata(self, values: dict[str, Any], line: int) -> dict[str, Any]:
        metadata = _from_text(values.get(self.keys.metadata))
        if metadata is None:
            return {}
        if not isinstance(metadata, dict):
            self.refuse(line, f'metadata "{self.keys.metadata}" is {kind(metadata)}, not an object')
        return metadata

    def _tools(self, values: dict[str, Any], line: int) -> list[dict[str, Any]]:
        tools = _from_text(values.get(self.keys.tools))
        if tools is None:
            return []
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            what = "is a list of something other than objects" if isinstance(tools, list) else f"is {kind(tools)}"
            self.refuse(line, f'tools "{self.keys.tools}" {what}; a list of tool objects works (--tool-key)')
        return tools

    def _known(self, values: dict[str, Any]) -> str:
        return ", ".join(f'"{name}"' for name in self.names or values) or "none"


def _from_text(value: Any) -> Any:
    """A value that may stand as JSON text, as it does in files whose columns have one type."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        return value


def kind(value: Any) -> str:
    """What a value is, in words."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float | int):
        return "a number" if math.isfinite(value) else "no finite number"
    if isinstance(value, str):
        return "text"
    if isinstance(value, list):
        return "a list"
    return "an object" if isinstance(value, dict) else f"of type {type(value).__name__}"
