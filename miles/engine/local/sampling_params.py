"""A request's `sampling_params` object in; checked parameters under SGLang's names out."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from miles.errors import EngineRefused

GREEDY_BELOW = 1e-6
"""A temperature below this means greedy decoding, as in SGLang."""


@dataclass(frozen=True)
class SamplingParams:
    """How a response is sampled and where it ends.

    ``stop`` are texts, ``stop_token_ids`` token ids; both still end a response that ignores eos. ``max_new_tokens`` None:
    128, or what the context leaves. ``top_k`` -1: off. ``spaces_between_special_tokens`` is accepted for SGLang's sake;
    the tokenizers that this engine reads don't know it.
    """

    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    spaces_between_special_tokens: bool = True
    sampling_seed: int | None = None

    @classmethod
    def parse(cls, values: Any) -> SamplingParams:
        """Checks a JSON object; null means the default. Raises EngineRefused, naming the parameter and what it may be."""
        if not isinstance(values, dict):
            raise EngineRefused(f"sampling_params is {_kind(values)}; an object is needed")
        checked: dict[str, Any] = {}
        for name, value in values.items():
            if value is None:
                continue
            if name in _RULES:
                accepted, wanted = _RULES[name]
                if not accepted(value):
                    raise EngineRefused(f"sampling_params.{name} is {_shown(value)}; {wanted}")
                checked[name] = value
            elif name not in _NEUTRAL:
                raise EngineRefused(f"sampling_params.{name} is unknown; known are {', '.join(_RULES)}")
            elif value != _NEUTRAL[name]:
                raise EngineRefused(
                    f"sampling_params.{name} = {_shown(value)} is not supported; {_NEUTRAL[name]!r} is, or leave it out"
                )
        for name in ("stop", "stop_token_ids"):
            if name in checked:
                checked[name] = (checked[name],) if isinstance(checked[name], str | int) else tuple(checked[name])
        params = cls(**checked)
        if params.max_new_tokens is not None and params.min_new_tokens > params.max_new_tokens:
            raise EngineRefused(
                f"sampling_params.min_new_tokens {params.min_new_tokens} is more than "
                f"max_new_tokens {params.max_new_tokens}"
            )
        return params

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def penalised(self) -> bool:
        return (self.frequency_penalty, self.presence_penalty, self.repetition_penalty) != (0, 0, 1)

    @property
    def truncated(self) -> bool:
        """Whether top-k, top-p or min-p take anything away."""
        return not self.greedy and (self.top_k != -1 or self.top_p < 1 or self.min_p > 0)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _are(value: Any, accepted: Callable[[Any], bool]) -> bool:
    return accepted(value) or (isinstance(value, list) and all(accepted(v) for v in value))


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _kind(value: Any) -> str:
    return "missing" if value is None else f"a {type(value).__name__}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


_FLAG = (_is_bool, "true or false is needed")
_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "max_new_tokens": (lambda v: _is_int(v) and v >= 1, "a whole number of at least 1 is needed"),
    "min_new_tokens": (lambda v: _is_int(v) and v >= 0, "a whole number of at least 0 is needed"),
    "temperature": (lambda v: _is_number(v) and v >= 0, "a number of at least 0 is needed (0: greedy)"),
    "top_p": (lambda v: _is_number(v) and 0 < v <= 1, "a number above 0 and up to 1 is needed"),
    "top_k": (lambda v: _is_int(v) and (v == -1 or v >= 1), "-1 (off) or a whole number of at least 1 is needed"),
    "min_p": (lambda v: _is_number(v) and 0 <= v <= 1, "a number from 0 to 1 is needed"),
    "frequency_penalty": (lambda v: _is_number(v) and -2 <= v <= 2, "a number from -2 to 2 is needed"),
    "presence_penalty": (lambda v: _is_number(v) and -2 <= v <= 2, "a number from -2 to 2 is needed"),
    "repetition_penalty": (lambda v: _is_number(v) and 0 < v <= 2, "a number above 0 and up to 2 is needed"),
    "stop": (lambda v: _are(v, lambda s: isinstance(s, str) and s != ""), "a text or a list of texts is needed"),
    "stop_token_ids": (lambda v: _are(v, lambda i: _is_int(i) and i >= 0), "a list of token ids is needed"),
    "ignore_eos": _FLAG,
    "skip_special_tokens": _FLAG,
    "no_stop_trim": _FLAG,
    "spaces_between_special_tokens": _FLAG,
    "sampling_seed": (lambda v: _is_int(v) and abs(v) < 2**63, "a whole number of 64 bits is needed"),
}
_NEUTRAL: dict[str, Any] = {
    "n": 1,
    "json_schema": None,
    "regex": None,
    "ebnf": None,
    "structural_tag": None,
    "stop_regex": None,
    "logit_bias": None,
    "custom_params": None,
}
"""SGLang's parameters that this engine doesn't have, with the value that asks nothing of it."""
