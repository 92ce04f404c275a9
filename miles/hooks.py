"""A dotted path in, the user's function out; and when it raises, the one error that names the hook and its own line."""

from __future__ import annotations

import difflib
import importlib
import inspect
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from miles.errors import HookError


class FunctionRegistry:
    """Functions by name, looked up before any import: code in the same process hands hooks over without a module."""

    def __init__(self) -> None:
        self._functions: dict[str, Any] = {}

    @contextmanager
    def temporary(self, name: str, function: Any) -> Iterator[None]:
        """Registers ``function`` for the length of a with block; what stood there before comes back after it."""
        before = dict(self._functions)
        self._functions[name] = function
        try:
            yield
        finally:
            self._functions = before

    def get(self, name: str) -> Any:
        return self._functions.get(name)


function_registry = FunctionRegistry()


def load_function(path: str | None) -> Any:
    """What ``module.name`` stands for: a registered function, else the module's attribute; None for an empty path.

    Raises HookError that says which part failed: the path's form, the import, or the name.
    """
    if not path:
        return None
    registered = function_registry.get(path)
    if registered is not None:
        return registered
    module_name, _, name = path.rpartition(".")
    if not module_name or not name:
        raise HookError(f"{path}: a hook is named module.function, for example my_rewards.score")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # importing runs user code: whatever it raises is the hook's failure
        missing = isinstance(error, ModuleNotFoundError) and error.name and module_name.startswith(error.name)
        why = "there is no such module on sys.path (PYTHONPATH adds folders)" if missing else _where(error)
        raise HookError(f"{path}: module {module_name} can't be imported: {why}") from error
    if not hasattr(module, name):
        near = difflib.get_close_matches(name, dir(module), n=1)
        hint = f"; did you mean {module_name}.{near[0]}?" if near else ""
        raise HookError(f"{path}: {module_name} ({getattr(module, '__file__', '?')}) has no {name}{hint}")
    return getattr(module, name)


def hook_failed(path: str, function: Callable[..., Any], error: Exception, on: str) -> HookError:
    """The error to raise from ``error`` where a hook failed ``on`` something, such as "sample 12"."""
    return HookError(f"{path} failed on {on}: {_where(error, function)}")


def metrics_of(path: str, given: Any, prefix: str) -> dict[str, float]:
    """A hook's metrics as numbers by full name: a name without a slash gets ``prefix``. None: none.

    Raises HookError for what is no mapping of names to numbers.
    """
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise HookError(f"{path} gave {given!r:.100}; a dict of metric names and numbers works")
    wrong = [name for name, value in given.items() if not isinstance(name, str) or not hasattr(value, "__float__")]
    if wrong:
        raise HookError(f"{path} gave {given[wrong[0]]!r:.100} for {wrong[0]!r}; a number works")
    return {name if "/" in name else prefix + name: float(value) for name, value in given.items()}


def _where(error: Exception, function: Callable[..., Any] | None = None) -> str:
    """The exception and the innermost line of the hook's own file (of any file, if none is known) that it passed."""
    frames = traceback.extract_tb(error.__traceback__)
    code = getattr(inspect.unwrap(function), "__code__", None) if function else None
    own = [f for f in frames if code is not None and f.filename == code.co_filename] or list(frames)
    place = f" ({own[-1].filename}:{own[-1].lineno})" if own else ""
    return f"{type(error).__name__}: {error}{place}"
