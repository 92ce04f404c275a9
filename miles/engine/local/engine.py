"""Sequences and commands in, ended sequences out: the engine as a plain synchronous object, one `step` at a time.

A step lets requests join, runs one forward over all tokens of the step, draws one token per request and ends what ended.
Weights, version and membership change between two steps only. `StepThread` drives it; so can a test.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Literal

import numpy as np
import torch

from miles.engine.local.attention import StepBatch
from miles.engine.local.model import Model
from miles.engine.local.sampler import Drawn, SamplingBatch, sample, uniforms
from miles.engine.local.scheduler import Scheduler
from miles.engine.local.sequence import Decode, Sequence

PauseMode = Literal["abort", "retract", "in_place"]

log = logging.getLogger(__name__)


class Engine:
    """Continuous batching over one model. Not thread-safe.

    ``decode`` turns response ids into text, for stop texts. ``weight_version`` labels the weights of ``model``.
    """

    def __init__(self, model: Model, scheduler: Scheduler, decode: Decode, weight_version: str = "default") -> None:
        self.weight_version = weight_version
        self.paused = False
        self._model = model
        self._scheduler = scheduler
        self._decode = decode
        self._sampling = SamplingBatch.of([])
        self._ended: list[Sequence] = []

    @property
    def running(self) -> int:
        return len(self._scheduler.running)

    @property
    def waiting(self) -> int:
        return len(self._scheduler.waiting)

    @property
    def may_step(self) -> bool:
        return not self.paused and bool(self.running or self.waiting)

    def requests(self) -> tuple[list[Sequence], list[Sequence]]:
        """Those that run and those that wait."""
        return list(self._scheduler.running), list(self._scheduler.waiting)

    def submit(self, sequence: Sequence) -> None:
        self._scheduler.add(sequence)

    def take_ended(self) -> list[Sequence]:
        """The sequences that ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    # ---- commands

    def abort(self, wanted: Callable[[Sequence], bool], message: str) -> int:
        """Ends matching requests with what they have; returns how many."""
        matching = self._scheduler.find(wanted)
        for sequence in matching:
            sequence.finish_reason = {"type": "abort", "message": message}
        self._collect(self._scheduler.remove_ended())
        return len(matching)

    def pause(self, mode: PauseMode) -> None:
        """abort: all end. retract: all wait, and are computed again later. in_place: all stay as they are."""
        self.paused = True
        if mode == "abort":
            self.abort(lambda _: True, "generation was paused with mode abort")
        elif mode == "retract":
            self._scheduler.retract()

    def resume(self) -> None:
        self.paused = False

    def adopt(self, model: Model, version: str | None) -> None:
        """Swaps the weights, and with them the label where one is given."""
        self._model = model
        if version is not None:
            self.set_version(version)

    def set_version(self, version: str) -> None:
        self.weight_version = version
        for sequence in self._scheduler.running:
            sequence.mark_version(version)

    # ---- a step

    @torch.inference_mode()
    def step(self) -> None:
        """One token for each running request. What fails ends with the cause, and the engine goes on."""
        joining = self._scheduler.admit()
        running = self._scheduler.running
        for sequence in joining:
            sequence.mark_version(self.weight_version)
        try:
            drawn = self._draw(running, len(running) - len(joining))
        except Exception as error:  # invariant: a failed step costs the requests in it, never the server
            log.exception("a step failed")
            for row, sequence in enumerate(running):
                self._fail(row, sequence, f"the engine failed while generating: {type(error).__name__}: {error}")
        else:
            self._extend(running, drawn)
        self._collect(self._scheduler.remove_ended())

    def _draw(self, running: list[Sequence], decoding: int) -> Drawn:
        """A token per request: the first ``decoding`` have their keys and values cached, the rest join."""
        if self._sampling.sequences != running:
            self._sampling = SamplingBatch.of(running)
        batch = StepBatch(running[:decoding], running[decoding:], self._scheduler.cache)
        logits_BV = self._model.forward(batch.tokens_N, batch.positions_N, batch.last_B, batch.attend)
        uniform_B = uniforms(self._sampling.seeds, batch.ends_B.numpy().astype(np.uint64))
        return sample(logits_BV, self._sampling, uniform_B)

    def _extend(self, running: list[Sequence], drawn: Drawn) -> None:
        rows = zip(running, drawn.tokens, drawn.log_probs, drawn.finite, strict=True)
        for row, (sequence, token, log_prob, finite) in enumerate(rows):
            if not finite:
                where = f"at response token {len(sequence.output_ids)} with weight version {self.weight_version!r}"
                self._fail(row, sequence, f"the logits are not finite (NaN or infinity) {where}; check the weights")
                continue
            sequence.append(token, log_prob)
            sequence.finish_reason = sequence.reached_end(self._decode)

    def _fail(self, row: int, sequence: Sequence, cause: str) -> None:
        """Ends a running request with an error, and leaves no NaN of it in the cache."""
        sequence.failure = cause
        self._scheduler.cache.erase(row)

    def _collect(self, ended: list[Sequence]) -> None:
        for sequence in ended:
            sequence.weight_version = self.weight_version
        self._ended += ended
