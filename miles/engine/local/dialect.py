"""SGLang's `/generate`: a JSON body in, a `Sequence` for the engine out; an ended sequence in, the JSON reply out."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any

import orjson

from miles.engine.local.sampling_params import SamplingParams
from miles.engine.local.sequence import Sequence
from miles.engine.local.text import Text
from miles.errors import EngineRefused

DEFAULT_MAX_NEW_TOKENS = 128
FIELDS = ("rid", "input_ids", "text", "sampling_params", "return_logprob", "stream")


@dataclass(frozen=True)
class Request:
    """A checked body. Either ``input_ids`` or ``text`` is there."""

    rid: str
    input_ids: list[int] | None
    text: str | None
    params: SamplingParams
    return_logprob: bool


@dataclass(frozen=True)
class Dialect:
    """What requests are checked against. ``context_length`` bounds prompt plus response, in tokens."""

    text: Text
    vocab_size: int
    context_length: int
    eos_ids: frozenset[int]

    def parse(self, body: bytes) -> Request:
        """Checks everything that needs no tokenizer. Raises EngineRefused, naming the field."""
        try:
            fields = orjson.loads(body)
        except orjson.JSONDecodeError as error:
            raise EngineRefused(f"the body is not valid JSON: {error}") from None
        if not isinstance(fields, dict):
            raise EngineRefused(f"the body is a JSON {type(fields).__name__}; an object is needed")
        if unknown := [name for name, value in fields.items() if name not in FIELDS and value not in (None, False)]:
            raise EngineRefused(f"{unknown[0]} is not supported here; a request has {', '.join(FIELDS)}")
        if _optional(fields, "stream", bool):
            raise EngineRefused("stream is not supported; leave it out or send false")
        text, input_ids = _optional(fields, "text", str), fields.get("input_ids")
        if (text is None) == (input_ids is None):
            raise EngineRefused("a request needs one of input_ids and text")
        if input_ids is not None:
            self._check_ids(input_ids)
        params = SamplingParams.parse(fields.get("sampling_params") or {})
        if params.stop:
            self.text.require()
        return Request(
            rid=_optional(fields, "rid", str) or uuid.uuid4().hex,
            input_ids=input_ids,
            text=text,
            params=params,
            return_logprob=_optional(fields, "return_logprob", bool) or False,
        )

    def encode(self, request: Request) -> list[int]:
        return self.text.encode(request.text or "")

    def sequence(self, request: Request, prompt_ids: list[int], seed: int) -> Sequence:
        """The engine's side of a request. Raises EngineRefused where it can't fit into the context."""
        params, room = request.params, self.context_length - len(prompt_ids)
        if not prompt_ids:
            raise EngineRefused("the prompt has no tokens; at least 1 is needed")
        if room < (params.max_new_tokens or 1):
            raise EngineRefused(
                f"the prompt has {len(prompt_ids)} tokens and max_new_tokens is {params.max_new_tokens or 1}: together "
                f"more than the context of {self.context_length}; "
                + (f"at most {room} new tokens fit" if room > 0 else "send a shorter prompt")
            )
        stops = {i for i in params.stop_token_ids if i < self.vocab_size}
        stops |= set() if params.ignore_eos else self.eos_ids
        if params.min_new_tokens and len(stops) == self.vocab_size:
            raise EngineRefused("min_new_tokens can't be reached: every token of the vocabulary is a stop")
        return Sequence(
            rid=request.rid,
            prompt_ids=prompt_ids,
            params=params,
            max_new_tokens=params.max_new_tokens or min(DEFAULT_MAX_NEW_TOKENS, room),
            stop_ids=sorted(stops),
            seed=params.sampling_seed if params.sampling_seed is not None else seed,
        )

    def reply(self, sequence: Sequence, return_logprob: bool, latency_s: float) -> bytes:
        """The body of a 200."""
        meta: dict[str, Any] = {
            "id": sequence.rid,
            "finish_reason": sequence.finish_reason,
            "prompt_tokens": len(sequence.prompt_ids),
            "completion_tokens": len(sequence.output_ids),
            "cached_tokens": sequence.cached_tokens,
            "weight_version": sequence.weight_version,
            "weight_versions": sequence.version_spans(),
            "e2e_latency": latency_s,
        }
        if return_logprob:
            pairs = zip(sequence.log_probs, sequence.output_ids, strict=True)
            meta["output_token_logprobs"] = [(log_prob, token, None) for log_prob, token in pairs]
        return orjson.dumps(
            {"text": self._response_text(sequence), "output_ids": sequence.output_ids, "meta_info": meta}
        )

    def _response_text(self, sequence: Sequence) -> str:
        """The decoded response up to its stop; the ids keep the stop, and so does the text with ``no_stop_trim``."""
        ids, params = sequence.output_ids, sequence.params
        matched = (sequence.finish_reason or {}).get("matched")
        if matched is None or params.no_stop_trim:
            return self.text.decode(ids, params.skip_special_tokens)
        if isinstance(matched, int):
            return self.text.decode(ids[:-1], params.skip_special_tokens)
        return self.text.decode(ids, params.skip_special_tokens).partition(matched)[0]

    def _check_ids(self, ids: Any) -> None:
        if not isinstance(ids, list) or not all(type(i) is int for i in ids):
            raise EngineRefused("input_ids must be one list of token ids (one prompt per request)")
        if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
            wrong = next(i for i in ids if not 0 <= i < self.vocab_size)
            raise EngineRefused(f"input_ids holds {wrong}; the vocabulary is 0 to {self.vocab_size - 1}")


def _optional(fields: dict[str, Any], name: str, kind: type) -> Any:
    value = fields.get(name)
    if value is not None and not isinstance(value, kind):
        raise EngineRefused(f"{name} is a {type(value).__name__}; a {kind.__name__} is needed")
    return value
