"""Field definitions in, an argument parser and typed values out: a flag is written once, where its setting lives."""

from __future__ import annotations

import argparse
import difflib
import json
import math
import types
import typing
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, field, fields
from typing import Any

from miles.config.problems import Problems
from miles.errors import SettingsError

FLAG = "flag"
"""The source of what was given as a flag; that of a file is ``name:line``."""


def flag(
    default: Any,
    help: str,
    *,
    choices: Sequence[str] = (),
    name: str | None = None,
    positive: bool = False,
    nargs: Any = None,
    secret: bool = False,
) -> Any:
    """A dataclass field that is also a flag. ``name`` overrides ``--field-name``; a bool that defaults to True is
    switched off by its flag. ``positive`` refuses zero and less; ``nargs`` is argparse's; a ``secret`` is never shown."""
    metadata = {
        "help": help, "choices": tuple(choices), "name": name, "positive": positive, "nargs": nargs, "secret": secret,
    }  # fmt: skip
    if isinstance(default, dict):
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, metadata=metadata, repr=not secret)


def shown(setting: Field[Any], value: Any) -> Any:
    """The value as files, logs and trackers may hold it."""
    return "***" if setting.metadata.get("secret") and value is not None else value


def flag_name(setting: Field[Any]) -> str:
    return setting.metadata["name"] or "--" + setting.name.replace("_", "-")


def default_of(setting: Field[Any]) -> Any:
    return setting.default_factory() if setting.default_factory is not MISSING else setting.default


def flag_fields(owner: type) -> list[Field[Any]]:
    return [f for f in fields(owner) if "help" in f.metadata]


def hinted(owner: type) -> list[tuple[Field[Any], Any]]:
    """The flags of an owner with their types."""
    hints = typing.get_type_hints(owner)
    return [(setting, hints[setting.name]) for setting in flag_fields(owner)]


# ---- the parser


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> typing.NoReturn:
        raise SettingsError([message])


def build_parser(owners: Iterable[type], prog: str) -> argparse.ArgumentParser:
    """One parser with a group of flags for each owner; values stay text, `convert` types them."""
    parser = _Parser(prog=prog, argument_default=argparse.SUPPRESS)
    for owner in owners:
        group = parser.add_argument_group((owner.__doc__ or owner.__name__).splitlines()[0])
        for setting, hint in hinted(owner):
            add_flag(group, setting, hint, _help_of(setting))
    return parser


def add_flag(group: argparse._ActionsContainer, setting: Field[Any], hint: Any, text: str = argparse.SUPPRESS) -> None:
    """Adds one flag; a bool's also with ``--no-`` before it, which says the opposite."""
    name, dest, metadata = flag_name(setting), setting.name, setting.metadata
    if hint is bool:
        default = default_of(setting)
        group.add_argument(name, dest=dest, action="store_const", const=not default, help=text)
        group.add_argument(f"--no-{name[2:]}", dest=dest, action="store_const", const=default, help=argparse.SUPPRESS)
        return
    choices = metadata["choices"]
    metavar = "{" + ",".join(choices) + "}" if choices else base_type(hint).__name__.upper()
    nargs = metadata["nargs"] or ("+" if is_tuple(hint) else None)
    group.add_argument(name, dest=dest, nargs=nargs, metavar=metavar, help=text)


def _help_of(setting: Field[Any]) -> str:
    text, default = setting.metadata["help"].replace("%", "%%"), default_of(setting)
    plain = isinstance(default, bool) or default in (None, (), {})
    return text if plain else f"{text} (default {default})"


def nearest(word: str, words: Iterable[str], otherwise: str) -> str:
    """A hint at the name that was meant."""
    near = difflib.get_close_matches(word, list(words), n=1)
    return f"did you mean {near[0]}?" if near else otherwise


# ---- typed values


def convert(
    settings: Iterable[tuple[Field[Any], Any]],
    given: Mapping[str, Any],
    problems: Problems,
    *,
    sources: Mapping[str, str],
    later: Mapping[str, Collection[str]],
) -> dict[str, Any]:
    """Values by field name from the given texts; each that can't be read becomes a problem.

    ``later``: choices by flag that other builds have, so that the message can tell them from typing errors.
    """
    values = {}
    for setting, hint in settings:
        name = setting.name
        if name in given:
            try:
                values[name] = _typed(setting, hint, given[name])
            except ValueError as error:
                flag = flag_name(setting)
                why = "is not here yet" if str(given[name]) in later.get(flag, ()) else str(error)
                problems.add(place(flag, sources.get(name)), given[name], why, _what_works(setting, hint))
    return values


def place(flag: str, source: str | None) -> str:
    """A flag as messages name it: with the line of the file that it comes from."""
    return flag if source in (None, FLAG) else f"{source} {flag}"


def _typed(setting: Field[Any], hint: Any, text: Any) -> Any:
    base, choices = base_type(hint), setting.metadata["choices"]
    several = is_tuple(hint)
    if isinstance(text, list | dict) and not (several and isinstance(text, list)) and base is not dict:
        raise ValueError("is more than one value")
    words = text if several and isinstance(text, list) else [text]
    values = tuple(_scalar(base, word) for word in words)
    if choices and not set(values) <= set(choices):
        raise ValueError("is none of the choices")
    if setting.metadata["positive"] and min(values) <= 0:
        raise ValueError("must be above 0")
    return values if several else values[0]


def _scalar(base: type, text: Any) -> Any:
    if not isinstance(text, str):
        return text
    if base is dict:
        value = json.loads(text)
        if not isinstance(value, dict):
            raise ValueError("is no JSON object")
        return value
    try:
        value = base(text)
        if base is float and not math.isfinite(value):
            raise ValueError
        return value
    except ValueError:
        raise ValueError(f"is not {'an integer' if base is int else 'a number'}") from None


def _what_works(setting: Field[Any], hint: Any) -> str:
    if setting.metadata["choices"]:
        near = ", ".join(setting.metadata["choices"])
        return f"one of {near} works"
    default = default_of(setting)
    example = {int: "8", float: "0.5", dict: '{"enable_thinking": false}'}.get(base_type(hint), "text")
    return f"for example {example if default in (None, (), {}) else default} works"


def base_type(hint: Any) -> type:
    """The scalar behind ``int | None`` or ``tuple[int, ...]``."""
    options = [a for a in typing.get_args(hint) if a not in (types.NoneType, Ellipsis)]
    origin = typing.get_origin(hint)
    if origin is tuple or origin is types.UnionType:
        return base_type(options[0])
    return typing.cast(type, origin or hint)


def is_tuple(hint: Any) -> bool:
    return typing.get_origin(hint) is tuple
