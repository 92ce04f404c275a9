"""Settings in, problems out: is there a reward for every sample, found before anything starts."""

from __future__ import annotations

from miles.config import Problems, Settings
from miles.data.rows import RowKeys
from miles.data.words import Word
from miles.errors import DataError, HookError
from miles.hooks import load_function
from miles.rollout.rm_hub.rm_types import is_known, known_types


def check(settings: Settings, problems: Problems) -> None:
    """Imports the custom function. A type that a row names is only known when its sample comes."""
    reward = settings.reward
    if reward.custom_rm_path:
        try:
            load_function(reward.custom_rm_path)
        except HookError as error:
            problems.add("--custom-rm-path", reward.custom_rm_path, str(error), "module.function works")
        return
    if reward.group_rm:
        problems.warn("--group-rm has no effect without --custom-rm-path: shipped types score one sample at a time")
    if reward.rm_type is None:
        if _has_no_reward(settings):
            problems.add(
                "--rm-type", None, "nor is --custom-rm-path, so samples get no reward", f"{known_types()} work"
            )
    elif not is_known(reward.rm_type):
        problems.add("--rm-type", reward.rm_type, "there is no such reward type", f"{known_types()} work")
    elif settings.data.label_key is None:
        problems.add(
            "--label-key", None, f"--rm-type {reward.rm_type} compares with a label", "--label-key label works"
        )


def _has_no_reward(settings: Settings) -> bool:
    """Neither the user's own generation nor the rows themselves (the first of each word) could bring a reward."""
    data = settings.data
    if settings.rollout.custom_generate_function_path or settings.mode == "function" or not data.prompt_data:
        return False
    keys = RowKeys.of_training(settings)
    try:
        firsts = [Word.parse(word).open(keys)[0] for word in data.prompt_data]
    except DataError:  # the data room's problem
        return False
    return any("rm_type" not in row.metadata for row in firsts)
