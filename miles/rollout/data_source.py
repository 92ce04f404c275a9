"""Rows of the prompt files in, groups of fresh samples out: the `DataSource` of the contract, and the two that are shipped.

Samples are numbered without end: ``group_index`` counts prompts, ``index`` samples, over all epochs. What `add_samples`
gives back is drawn again before new rows. A class of the user's (``--data-source-path``) is constructed as ``cls(args)``;
it has to have `get_samples`, and the rest is there for those that subclass `DataSource`.
"""

from __future__ import annotations

import json
import logging
from abc import ABC, abstractmethod
from argparse import Namespace
from collections.abc import Collection, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from miles.config import Settings
from miles.data.limit import PromptLimit
from miles.data.prompts import Prompt, PromptSource
from miles.data.render import PromptEncoder, load_tokenizer
from miles.data.rows import Row, RowKeys
from miles.data.words import Word
from miles.errors import DataError, HookError, MilesError
from miles.hooks import hook_failed, load_function
from miles.rollout.evaluation import EvalSet
from miles.types import Sample

log = logging.getLogger(__name__)

Groups = list[list[Sample]]


class DataSource(ABC):
    """Where prompts come from."""

    @abstractmethod
    def get_samples(self, num_samples: int) -> Groups:
        """``num_samples`` groups of ``args.n_samples_per_prompt`` samples."""

    def add_samples(self, samples: Groups) -> None:
        """Takes groups back, to be drawn again: those that a resumed run has open, and what hooks return."""
        raise RuntimeError(f"{type(self).__name__} takes no groups back")

    def save(self, rollout_id: int) -> None:  # noqa: B027  (a source without a state of its own has nothing to save)
        """Saves what `load` needs after step ``rollout_id`` (from 0)."""

    def load(self, rollout_id: int | None = None) -> None:  # noqa: B027
        """Goes on where `save` was called."""

    def get_buffer_length(self) -> int:
        """Groups that were given back and wait."""
        return 0

    def close(self) -> None:  # noqa: B027
        """The run has ended."""


class RolloutDataSource(DataSource):
    """Groups made from the rows of ``--prompt-data``; empty samples with ``--disable-rollout-global-dataset``.

    ``prompts`` are given by callers that have them open; else they are opened as ``args`` say. ``buffer`` holds what is
    drawn before new rows: here only what a resumed run had open.
    """

    def __init__(self, args: Namespace, prompts: PromptSource | None = None) -> None:
        self.args = args
        self.settings = Settings.from_namespace(args)
        self.dataset = prompts
        if prompts is None and self.settings.data.rollout_global_dataset:
            self.dataset = PromptSource.from_settings(self.settings, training_limit(self.settings))
        self.buffer: Groups = []
        self._group_size = self.settings.rollout.n_samples_per_prompt
        self._next_group = 0

    def get_samples(self, num_samples: int) -> Groups:
        picked = pop_first(self.args, None, self.buffer, num_samples)
        return picked + [self._new_group() for _ in range(num_samples - len(picked))]

    def get_buffer_length(self) -> int:
        return len(self.buffer)

    def _new_group(self) -> list[Sample]:
        if self.dataset is not None:
            return self.group(self.dataset.next_prompt().id)
        self._next_group += 1
        return self.group(self._next_group - 1)

    def group(self, number: int) -> list[Sample]:
        """The group of one draw, as it was or will be drawn."""
        prompt = Row(0, "", None, {}) if self.dataset is None else self.dataset.prompt(number)
        return fresh_samples(prompt, number, number * self._group_size, self._group_size)

    # ---- checkpoints

    def state(self, open_prompts: Groups) -> dict[str, Any]:
        """The cursor, and the number of every prompt that was drawn and not trained, as JSON values."""
        return {
            "cursor": None if self.dataset is None else self.dataset.state_dict(),
            "next_group": self._next_group,
            "open": [group[0].group_index for group in [*open_prompts, *self.buffer]],
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Goes on from `state`: the open prompts come first, drawn again from their rows."""
        if self.dataset is not None:
            self.dataset.load_state_dict(state["cursor"])
        self._next_group = state["next_group"]
        self.buffer = [self.group(number) for number in state["open"]]

    def go_on_after(self, drawn: Collection[int]) -> None:
        """Groups of these numbers were drawn since the state was saved: they are not drawn again."""
        self.buffer = [group for group in self.buffer if group[0].group_index not in drawn]
        if drawn and self.dataset is not None:
            self.dataset.go_on_after(drawn)
        elif drawn:
            self._next_group = max(self._next_group, max(drawn) + 1)

    def save(self, rollout_id: int) -> None:
        """`state` under ``args.save``, for callers without checkpoints of their own. Raises ValueError where it is unset."""
        if not self.args.save:
            raise ValueError("--save is not set: there is no folder to save the data source in")
        path = _state_file(self.args.save, rollout_id)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.state([])))

    def load(self, rollout_id: int | None = None) -> None:
        """What `save` left under ``args.load``; from the start, with a warning, where there is nothing."""
        if not self.args.load or rollout_id is None or rollout_id < 0:
            return
        path = _state_file(self.args.load, rollout_id)
        if path.exists():
            self.load_state(json.loads(path.read_text()))
        else:
            log.warning("%s does not exist: prompts are drawn from the first one on", path)


class RolloutDataSourceWithBuffer(RolloutDataSource):
    """The same, and takes groups back. ``--buffer-filter-path`` picks from them; without it the oldest come first."""

    def __init__(self, args: Namespace, prompts: PromptSource | None = None) -> None:
        super().__init__(args, prompts)
        self._filter_path = self.settings.data.buffer_filter_path or ""
        self._filter = load_function(self._filter_path) or pop_first

    def get_samples(self, num_samples: int) -> Groups:
        picked = self._pick(num_samples) if self.buffer else []
        return picked + [self._new_group() for _ in range(num_samples - len(picked))]

    def _pick(self, count: int) -> Groups:
        try:
            picked = list(self._filter(self.args, None, self.buffer, count))
        except Exception as error:  # the boundary to user code: whatever it raises is the hook's failure
            raise hook_failed(
                self._filter_path, self._filter, error, f"a buffer of {len(self.buffer)} groups"
            ) from error
        if len(picked) > count:
            raise HookError(f"{self._filter_path} picked {len(picked)} groups where {count} were wanted")
        return picked

    def add_samples(self, samples: Groups) -> None:
        """Raises ValueError for a group that isn't whole."""
        for group in samples:
            if len(group) != self._group_size:
                raise ValueError(f"a group of {len(group)} samples was given back; groups have {self._group_size}")
            self.buffer.append(group)


def pop_first(args: Namespace, rollout_id: int | None, buffer: Groups, num_samples: int) -> Groups:
    """The oldest groups of a buffer, at most ``num_samples``; they leave it. The form of ``--buffer-filter-path``."""
    picked = buffer[:num_samples]
    del buffer[: len(picked)]
    return picked


# ---- a source by its path


def make_data_source(args: Namespace, path: str) -> Any:
    """``--data-source-path``, constructed. Raises HookError where that fails."""
    made = load_function(path)
    try:
        return made(args)
    except MilesError:
        raise
    except Exception as error:  # the boundary to user code: whatever it raises is the hook's failure
        raise hook_failed(path, made, error, "its construction") from error


def skipped_rows(source: Any) -> tuple[int, str]:
    """How many rows were drawn and too long, and which was the first; none for a source that has no rows of ours."""
    dataset = getattr(source, "dataset", None)
    return (dataset.skipped, dataset.first_skipped) if isinstance(dataset, PromptSource) else (0, "")


class NumberedSource:
    """What the worker draws from, whoever wrote it: whole groups, numbered where they are not, and errors that name it."""

    def __init__(self, source: Any, path: str, group_size: int, drawn: int = 0) -> None:
        self._source = source
        self._path = path
        self._group_size = group_size
        self._drawn = drawn

    def get_samples(self, num_samples: int) -> Groups:
        """Raises HookError where the source fails, or gives something else than it was asked for."""
        try:
            groups = list(self._source.get_samples(num_samples))
        except MilesError:
            raise
        except Exception as error:  # the boundary to user code: whatever it raises is the hook's failure
            raise hook_failed(self._path, type(self._source).get_samples, error, f"draw {self._drawn}") from error
        sizes = [len(group) for group in groups]
        if sizes != [self._group_size] * num_samples:
            raise HookError(
                f"{self._path}: get_samples({num_samples}) gave groups of {sizes} samples; "
                f"{num_samples} of --n-samples-per-prompt {self._group_size} are needed"
            )
        for group in groups:
            self._number(group)
        return groups

    def _number(self, group: list[Sample]) -> None:
        """Seeds follow from the index, so samples without one would all be the same."""
        for i, sample in enumerate(group):
            sample.group_index = self._drawn if sample.group_index is None else sample.group_index
            sample.index = self._drawn * self._group_size + i if sample.index is None else sample.index
        self._drawn += 1


def saved_state(source: Any, rollout_id: int, open_prompts: Groups) -> dict[str, Any]:
    """What a checkpoint keeps of a source: its state, or that of the moment when its own `save` kept it."""
    if is_shipped(source):
        return {"source": source.state(open_prompts)}
    source.save(rollout_id)
    return {"rollout_id": rollout_id, "open": [[as_prompt(s) for s in group] for group in open_prompts]}


def resume(source: Any, state: dict[str, Any]) -> None:
    """Goes on from `saved_state`: what was open is drawn first, or given back to a source of the user's."""
    if is_shipped(source):
        source.load_state(state["source"])
        return
    source.load(state["rollout_id"])
    if state["open"]:
        source.add_samples(_as_groups(state["open"]))


def is_shipped(source: Any) -> bool:
    """Its state is ours to keep: one of the two classes, or a subclass that has no `save` of its own."""
    return isinstance(source, RolloutDataSource) and type(source).save is RolloutDataSource.save


def _state_file(folder: str, rollout_id: int) -> Path:
    return Path(folder) / "rollout" / f"global_dataset_state_dict_{rollout_id}.json"


# ---- samples


def fresh_samples(prompt: Prompt | Row, number: int, first_index: int, count: int) -> list[Sample]:
    """``count`` samples of one prompt, none of them sharing anything mutable."""
    return [
        Sample(
            group_index=number,
            index=first_index + i,
            prompt=deepcopy(prompt.prompt),
            label=prompt.label,
            metadata=deepcopy(prompt.metadata),
        )
        for i in range(count)
    ]


def as_prompt(sample: Sample) -> dict[str, Any]:
    """What a sample is before generation, as JSON values."""
    names = ("group_index", "index", "prompt", "label", "metadata")
    return {name: getattr(sample, name) for name in names}


def _as_groups(prompts: Sequence[Sequence[dict[str, Any]]]) -> Groups:
    return [[Sample(**sample) for sample in group] for group in prompts]


# ---- limits and evaluation


def training_limit(settings: Settings) -> PromptLimit | None:
    """``--rollout-max-prompt-len``, measured with a tokenizer that is loaded where there is a limit."""
    tokens, context = settings.max_prompt_len, settings.sampling.rollout_max_context_len
    why = f" (--rollout-max-context-len {context} - 1)" if context is not None and tokens == context - 1 else ""
    return _limit(settings, tokens, "--rollout-max-prompt-len" + why)


def eval_limit(settings: Settings) -> PromptLimit | None:
    """``--eval-max-prompt-len``; unset: one less than ``--eval-max-context-len``, else as in training."""
    tokens, context = settings.eval.eval_max_prompt_len, settings.eval.eval_max_context_len
    if tokens is None and context is not None:
        return _limit(settings, context - 1, f"--eval-max-prompt-len (--eval-max-context-len {context} - 1)")
    return training_limit(settings) if tokens is None else _limit(settings, tokens, "--eval-max-prompt-len")


def _limit(settings: Settings, tokens: int | None, flag: str) -> PromptLimit | None:
    if tokens is None:
        return None
    return PromptLimit(PromptEncoder.from_settings(settings, load_tokenizer(settings)), tokens, flag)


def eval_sets(settings: Settings) -> list[EvalSet]:
    """Every evaluation file as groups of samples; their indices are negative, so that no training sample has one.

    Raises DataError where all rows of a file are too long.
    """
    if settings.eval.eval_function_path is not None:
        return []
    sets, used = [], 0
    limit = eval_limit(settings) if settings.eval_datasets else None
    for dataset in settings.eval_datasets:
        count = dataset.n_samples_per_eval_prompt or settings.eval.n_samples_per_eval_prompt
        rows = list(Word.parse(dataset.path).open(RowKeys.of_evaluation(settings, dataset)))
        refusals = [limit.refusal(row) if limit else None for row in rows]
        groups = []
        for number, row in enumerate(row for row, why in zip(rows, refusals, strict=True) if why is None):
            used += count
            groups.append(fresh_samples(row, number, -used, count))
            for sample in groups[-1]:
                sample.metadata |= deepcopy(dataset.metadata())
                sample.generate_function_path = dataset.custom_generate_function_path
        skipped = [why for why in refusals if why is not None]
        if not groups:
            place = f"{settings.eval_flag} {dataset.name} {dataset.path}"
            raise DataError(f"{place}: all {len(rows)} rows are too long; {skipped[0]}")
        sets.append(EvalSet(dataset.name, groups, tuple(skipped), dataset.sampling_params()))
    return sets
