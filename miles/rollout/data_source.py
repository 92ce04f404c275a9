"""Rows of the prompt file in, groups of fresh samples out: the `DataSource` of the contract.

Samples are numbered without end: ``group_index`` counts prompts, ``index`` samples, over all epochs. What `add_samples`
gives back is drawn again before new rows.
"""

from __future__ import annotations

from collections import deque
from copy import deepcopy
from typing import Any, Protocol

from miles.config import Settings
from miles.data.prompts import Prompt, PromptSource
from miles.rollout.evaluation import EvalSet
from miles.types import Sample, iter_samples


class DataSource(Protocol):
    """Where rollout functions get their prompts."""

    def get_samples(self, num_samples: int) -> list[list[Sample]]: ...

    def add_samples(self, samples: list[list[Sample]]) -> None: ...

    def get_buffer_length(self) -> int: ...


class RolloutDataSourceWithBuffer:
    """Groups of ``n_samples_per_prompt`` samples, from the buffer of given-back groups first."""

    def __init__(self, prompts: PromptSource, group_size: int) -> None:
        self.dataset = prompts
        self.buffer: deque[list[Sample]] = deque()
        self._group_size = group_size

    @classmethod
    def from_settings(cls, settings: Settings) -> RolloutDataSourceWithBuffer:
        data = settings.data
        prompts = PromptSource.from_file(
            data.prompt_data or "",
            input_key=data.input_key,
            label_key=data.label_key,
            metadata_key=data.metadata_key,
            seed=data.rollout_seed,
            shuffle=data.rollout_shuffle,
        )
        return cls(prompts, settings.rollout.n_samples_per_prompt)

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        """``num_samples`` groups."""
        return [self.buffer.popleft() if self.buffer else self._new_group() for _ in range(num_samples)]

    def _new_group(self) -> list[Sample]:
        return fresh_samples(self.dataset.next_prompt(), self._group_size)

    def add_samples(self, samples: list[list[Sample]]) -> None:
        """Takes groups back; they are drawn again, in this order, before new rows."""
        for group in samples:
            if len(group) != self._group_size:
                raise ValueError(f"a group of {len(group)} samples was given back; groups have {self._group_size}")
            self.buffer.append(group)

    def get_buffer_length(self) -> int:
        return len(self.buffer)

    # ---- checkpoints

    def state(self, open_prompts: list[list[Sample]]) -> dict[str, Any]:
        """The cursor and the number of every prompt that was drawn and not trained, as JSON values."""
        waiting = [*open_prompts, *self.buffer]
        return {"cursor": self.dataset.state_dict(), "open": [group[0].group_index for group in waiting]}

    def load_state(self, state: dict[str, Any]) -> None:
        """Goes on from `state`: the open prompts come first, drawn again from their rows."""
        self.dataset.load_state_dict(state["cursor"])
        self.buffer = deque(fresh_samples(self.dataset.prompt(number), self._group_size) for number in state["open"])


def fresh_samples(prompt: Prompt, count: int) -> list[Sample]:
    """``count`` samples of one prompt, numbered after its draw, none of them sharing anything mutable."""
    return [
        Sample(
            group_index=prompt.id,
            index=prompt.id * count + i,
            prompt=deepcopy(prompt.prompt),
            label=prompt.label,
            metadata=deepcopy(prompt.metadata),
        )
        for i in range(count)
    ]


def eval_sets(settings: Settings) -> list[EvalSet]:
    """Every evaluation file as groups of samples; their indices are negative, so that no training sample has one."""
    sets, used = [], 0
    for name, path in settings.eval_sets:
        prompts = PromptSource.from_file(
            path,
            input_key=settings.eval.eval_input_key or settings.data.input_key,
            label_key=settings.eval.eval_label_key or settings.data.label_key,
            metadata_key=settings.data.metadata_key,
            seed=0,
            shuffle=False,
        )
        groups = [fresh_samples(p, settings.eval.n_samples_per_eval_prompt) for p in prompts.take(prompts.rows)]
        for sample in iter_samples(groups):
            used += 1
            sample.index = -used
        sets.append(EvalSet(name, groups))
    return sets
