"""One request on its way through the engine: prompt and parameters in; tokens, log-probs, version spans and an end out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from miles.engine.local.sampling_params import SamplingParams

FinishReason = dict[str, Any]
Decode = Callable[[list[int]], str]


@dataclass(eq=False, slots=True)
class Sequence:
    """A request and its response so far. Only the step thread writes to it, until it is handed over.

    ``finish_reason`` (SGLang's object) or ``failure`` (the cause of a 500) is set at the end, never both.
    ``weight_version`` is the label at the end.
    """

    rid: str
    prompt_ids: list[int]
    params: SamplingParams
    max_new_tokens: int
    stop_ids: list[int]
    seed: int
    output_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    failure: str | None = None
    weight_version: str = ""
    arrival: int = 0
    length: int = 0
    """Prompt and response tokens so far."""
    cached_tokens: int = 0
    """Prompt tokens that needed no prefill."""
    _starts: list[tuple[str, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.length = len(self.prompt_ids)

    @property
    def ended(self) -> bool:
        return self.finish_reason is not None or self.failure is not None

    def append(self, token: int, log_prob: float) -> None:
        self.output_ids.append(token)
        self.log_probs.append(log_prob)
        self.length += 1

    def mark_version(self, version: str) -> None:
        """What is sampled from here on is sampled by the weights of ``version``."""
        start = len(self.output_ids)
        if self._starts and self._starts[-1][1] == start:
            self._starts.pop()
        if not self._starts or self._starts[-1][0] != version:
            self._starts.append((version, start))

    def version_spans(self) -> list[dict[str, Any]]:
        """SGLang's spans: each sampled token lies in exactly one, in order; the bounds are response positions."""
        ends = [start for _, start in self._starts[1:]] + [len(self.output_ids)]
        spans = zip(self._starts, ends, strict=False)
        return [{"version": version, "start": start, "end": end} for (version, start), end in spans if start < end]

    def reached_end(self, decode: Decode) -> FinishReason | None:
        """Why the response ends with its last token, if it does. A stop counts before the length."""
        count = len(self.output_ids)
        if count >= self.params.min_new_tokens:
            if self.output_ids[-1] in self.stop_ids:
                return {"type": "stop", "matched": self.output_ids[-1]}
            if self.params.stop and (matched := self._matched_stop(decode)) is not None:
                return {"type": "stop", "matched": matched}
        if count >= self.max_new_tokens:
            return {"type": "length", "length": count}
        return None

    def _matched_stop(self, decode: Decode) -> str | None:
        """The stop text that the last token completed. A token is at least one byte of text, but for special ones."""
        window = max(len(stop.encode()) for stop in self.params.stop) + 8
        tail = decode(self.output_ids[-window:])
        return next((stop for stop in self.params.stop if stop in tail), None)
