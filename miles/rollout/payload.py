"""The samples of a finished group in, a few kilobytes that bring them back out.

ids are int32, log-probs float32, masks bits, everything else JSON without what a fresh sample has. The JSON and the high
halves of ids, which are alike, go through zlib; the rest would only cost time there. Log-probs come back rounded to
float32, which is what training reads.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import orjson

from miles.types import Group, Sample

Values = dict[str, Any]

_FRESH = Sample().to_dict()
_STRICT = orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME | orjson.OPT_PASSTHROUGH_SUBCLASS
TOKENS, MASK = "tokens", "loss_mask"
_FLOATS = ("rollout_log_probs", "teacher_log_probs", "opd_reverse_kl")


class Payload:
    """A group as it is now. It is encoded where SQLite binds it: on the thread that writes, not on the event loop."""

    def __init__(self, group: Group) -> None:
        self._group = _each(group, _as_it_is)

    def __conform__(self, protocol: Any) -> bytes | None:
        return encode(self._group)


def _as_it_is(sample: Sample) -> Sample:
    """What `copy.copy` makes, in a fifth of the time: this is on the event loop."""
    made = object.__new__(type(sample))
    made.__dict__.update(sample.__dict__)
    return made


def encode(group: Group) -> bytes | None:
    """None where something in it would not come back as it is (an object of a hook, a tuple, NaN)."""
    dense, sparse = bytearray(), bytearray()
    try:
        head = _each(group, lambda sample: _plain(sample, dense, sparse))
        text = orjson.dumps(head, option=_STRICT)
        if orjson.loads(text) != head:
            return None
    except (TypeError, ValueError, OverflowError, AttributeError):
        return None
    packed = zlib.compress(b"".join([_size(text), text, sparse]), 1)
    return b"".join([_size(packed), packed, dense])


def decode(payload: bytes) -> Group:
    """The group that `encode` was given."""
    packed, dense = _split(payload)
    text, sparse = _split(zlib.decompress(packed))
    blocks = _Blocks(dense), _Blocks(sparse)
    return _each(orjson.loads(text), lambda values: _sample(values, *blocks))


def _size(part: bytes) -> bytes:
    return len(part).to_bytes(4, "little")


def _split(whole: bytes) -> tuple[bytes, bytes]:
    end = 4 + int.from_bytes(whole[:4], "little")
    return whole[4:end], whole[end:]


def _each(group: list[Any], change: Callable[[Any], Any]) -> list[Any]:
    """A group of the same shape: compact siblings stay lists."""
    return [[change(s) for s in item] if isinstance(item, list) else change(item) for item in group]


def _plain(sample: Sample, dense: bytearray, sparse: bytearray) -> Values:
    """JSON values of a sample; its arrays go to ``dense`` and ``sparse``, and their lengths into ``arrays``."""
    values = sample.to_dict()
    arrays: dict[str, int] = {}
    for name in (TOKENS, MASK, *_FLOATS):
        entries = values.pop(name)
        if entries is None:
            continue
        arrays[name] = len(entries)
        if name == TOKENS:
            halves = np.frombuffer(array("i", entries), np.uint16).reshape(-1, 2)
            dense += halves[:, 0].tobytes()
            sparse += halves[:, 1].tobytes()
        elif name == MASK:
            bits = np.frombuffer(bytes(entries), np.uint8)
            if bits.size and bits.max() > 1:
                raise ValueError("a loss mask holds something else than 0 and 1")
            dense += np.packbits(bits).tobytes()
        else:
            dense += array("f", entries).tobytes()
    values["version_spans"] = [list(span) for span in values["version_spans"]]
    told = {name: value for name, value in values.items() if name not in _FRESH or value != _FRESH[name]}
    return told | {"arrays": arrays}


def _sample(values: Values, dense: _Blocks, sparse: _Blocks) -> Sample:
    for name, length in values.pop("arrays").items():
        if name == TOKENS:
            halves = np.stack([dense.take(np.uint16, length), sparse.take(np.uint16, length)], axis=1)
            values[name] = halves.view(np.int32).ravel().tolist()
        elif name == MASK:
            values[name] = np.unpackbits(dense.take(np.uint8, (length + 7) // 8), count=length).tolist()
        else:
            values[name] = dense.take(np.float32, length).tolist()
    return Sample.from_dict(values)


class _Blocks:
    """Reads arrays in the order in which they were written."""

    def __init__(self, whole: bytes) -> None:
        self._whole = whole
        self._at = 0

    def take(self, kind: Any, length: int) -> np.ndarray[Any, Any]:
        block = np.frombuffer(self._whole, kind, length, self._at)
        self._at += block.nbytes
        return block
