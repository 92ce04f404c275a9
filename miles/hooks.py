"""A dotted path in, the user's function (or class) out."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from miles.errors import HookError


class FunctionRegistry:
    """Functions by name that need no module: looked up before imports."""

    def __init__(self) -> None:
        self._functions: dict[str, Any] = {}

    def get(self, name: str) -> Any:
        return self._functions.get(name)

    @contextmanager
    def temporary(self, name: str, function: Any) -> Iterator[None]:
        """``name`` stands for ``function`` within the block."""
        self._functions[name] = function
        try:
            yield
        finally:
            del self._functions[name]


function_registry = FunctionRegistry()


def load_function(path: str | None) -> Any:
    """What ``module.name`` names; None for an empty path. Raises `HookError` saying which part of the path is wrong."""
    if not path:
        return None
    registered = function_registry.get(path)
    if registered is not None:
        return registered
    module_name, _, name = path.rpartition(".")
    if not module_name:
        raise HookError(f"{path!r} is no path of the form module.name")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise HookError(f"{path}: module {module_name!r} can't be imported: {error}") from error
    if not hasattr(module, name):
        raise HookError(f"{path}: module {module_name!r} has no {name!r}")
    return getattr(module, name)
