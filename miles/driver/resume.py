"""What a run was told when it left a checkpoint, and what it is told now, in; what that changes, or why it can't be, out."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import miles
from miles.config import Settings
from miles.config.flags import flag_fields, flag_name
from miles.data.words import Word
from miles.errors import DataError

About = dict[str, Any]

QUIET = {"load", "save", "run_name", "run_dir", "num_rollout", "num_epoch", "custom_config_path", "prompt_data"}
"""Settings that may change without a word: where things lie, and how long the run is (`data_changes` looks at the rows)."""
SAMPLED_BY = {
    "hf_checkpoint", "input_key", "label_key", "metadata_key", "tool_key", "apply_chat_template",
    "apply_chat_template_kwargs", "chat_template_path", "rollout_batch_size", "n_samples_per_prompt",
    "max_weight_staleness", "staleness_policy", "update_weights_interval", "fully_async", "rollout_function_path",
    "rollout_partial_groups", "custom_generate_function_path", "dynamic_sampling_filter_path",
}  # fmt: skip
"""Beside all of sampling and rewards: what decides whether groups of before may be trained now."""
PART_BYTES = 1 << 20


@dataclass(frozen=True)
class Comparison:
    """``changed``: one line for each setting that differs. ``refused``: why it can't go on. ``keeps_finished``: what was
    sampled before and isn't trained fits to the settings of now."""

    changed: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    keeps_finished: bool = True


def about(settings: Settings) -> About:
    """What a checkpoint says of the run that wrote it, as JSON values."""
    return {
        "settings": json.loads(settings.to_json()),
        "data": data_marks(settings.data.prompt_data) if settings.data.rollout_global_dataset else [],
        "code_version": code_version(),
    }


def compare(saved: Mapping[str, Any], settings: Settings) -> Comparison:
    """``saved`` is what `about` gave then; what it lacks is not compared."""
    changed, keeps = [], True
    before, now = saved.get("settings", {}), json.loads(settings.to_json())
    for owner, kind in Settings.owners().items():
        for setting in flag_fields(kind):
            name = setting.name
            old, new = (values.get(owner, {}).get(name) for values in (before, now))
            if name in QUIET or name not in before.get(owner, {}) or old == new:
                continue
            resampled = owner in ("sampling", "reward") or name in SAMPLED_BY
            keeps = keeps and not resampled
            effect = "; what was finished and isn't trained is sampled again" if resampled else ""
            changed.append(f"{flag_name(setting)}: {_shown(old)} in the checkpoint, {_shown(new)} now{effect}")
    code = saved.get("code_version", code_version())
    if code != code_version():
        changed.append(f"miles: {code} wrote the checkpoint, {code_version()} goes on")
    return Comparison(changed, _data_changes(saved.get("data", []), settings), keeps)


def _data_changes(before: Sequence[Sequence[str]], settings: Settings) -> list[str]:
    if not before or not settings.data.rollout_global_dataset:
        return []
    words = settings.data.prompt_data
    now = data_marks(words)
    return [
        f"--prompt-data {new_word}: its content is another one than that of {old_word} in the checkpoint, so prompts would "
        "be skipped or repeated; resume with what it was, or without --load"
        for (old_word, old), (new_word, new) in zip(before, now, strict=False)
        if old != new
    ]


def data_marks(words: Sequence[str]) -> list[list[str]]:
    """Each word of ``--prompt-data`` with a mark of its file (size and three MiB of it); generated rows: with their name."""
    return [[word, _mark(word)] for word in words]


def _mark(word: str) -> str:
    try:
        parsed = Word.parse(word)
        if parsed.is_generated:
            return parsed.where
        with open(parsed.where, "rb") as file:
            size = file.seek(0, 2)
            marks = hashlib.blake2b(str(size).encode(), digest_size=16)
            for start in (0, size // 2, size - PART_BYTES):
                file.seek(max(start, 0))
                marks.update(file.read(PART_BYTES))
    except (DataError, OSError):
        return ""  # the check of the prompts says what is wrong with the word
    return marks.hexdigest()


@cache
def code_version() -> str:
    """The version, and a mark of the source: two checkouts of one version are told apart."""
    marks = hashlib.blake2b(digest_size=6)
    for file in sorted(Path(miles.__file__).parent.rglob("*.py")):
        marks.update(file.read_bytes())
    return f"{miles.__version__}+{marks.hexdigest()}"


def _shown(value: Any) -> str:
    return "unset" if value is None else " ".join(map(str, value)) if isinstance(value, list) else str(value)
