"""A batch's groups in, a file that holds them out, and the groups of such a file back: rollouts kept for debugging.

A file is a dict that `torch.save` wrote: ``rollout_id``; ``samples``, all of them as `Sample.to_dict` gives them; ``groups``,
the same ones in the lists in which they were taken. Where a file has no ``groups``, samples of one ``group_index`` are one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from miles.errors import DataError
from miles.loops import Changes
from miles.rollout.staleness import finished_group
from miles.types import FinishedGroup, Group, Sample

NUMBER = "{rollout_id}"


def path_of(template: str, step: int) -> Path:
    """The file of training step ``step`` (from 0)."""
    return Path(template.replace(NUMBER, str(step)))


def save_groups(template: str, step: int, groups: Sequence[Group]) -> None:
    """Writes one step's groups. Raises OSError where that fails."""
    import torch

    kept = [[_written(item) for item in group] for group in groups]
    samples = [sample for group in kept for item in group for sample in (item if isinstance(item, list) else [item])]
    path = path_of(template, step)
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"rollout_id": step, "samples": samples, "groups": kept}, path)


def load_groups(template: str, step: int) -> list[Group]:
    """What `save_groups` wrote, or an older program. Raises DataError where there is nothing that can be used."""
    import torch

    path = path_of(template, step)
    if not path.is_file():
        raise DataError(f"--load-debug-rollout-data: there is no {path} for training step {step}")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        groups = state.get("groups") or [list(g) for _, g in groupby(state["samples"], lambda s: s["group_index"])]
        return [[_read(item) for item in group] for group in groups]
    except Exception as error:  # a file may hold anything: whatever its reading raises, it can't be used
        why = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise DataError(f"--load-debug-rollout-data: {path} holds no rollouts ({why})") from error


def _written(item: Sample | list[Sample]) -> Any:
    return [sample.to_dict() for sample in item] if isinstance(item, list) else item.to_dict()


def _read(item: Any) -> Sample | list[Sample]:
    return [Sample.from_dict(sample) for sample in item] if isinstance(item, list) else Sample.from_dict(item)


class SavedFeed:
    """The batches of an earlier run, in the place of generation."""

    def __init__(self, template: str) -> None:
        self.changes = Changes()
        self._template = template

    async def run(self) -> None:
        """Nothing runs here: lives until it is cancelled."""
        await self.changes.wait_until(lambda: False)

    async def take(self, step: int) -> list[FinishedGroup]:
        """The groups that trained at ``step`` then, with the versions that they had."""
        return [finished_group(i, group) for i, group in enumerate(load_groups(self._template, step))]

    def pause_starts(self) -> None:
        """Nothing starts here."""

    def resume_starts(self) -> None:
        """Nothing starts here."""

    def status(self) -> dict[str, Any]:
        return {"generation_waits_for": "end"}

    def metrics(self) -> Mapping[str, float]:
        return {}

    def open_prompts(self) -> list[list[Sample]]:
        return []
