"""Settings in, problems out: is there a reward for every sample, found before anything starts."""

from __future__ import annotations

from miles.config import Problems, Settings
from miles.data.rows import RowKeys
from miles.data.words import Word
from miles.errors import DataError, HookError
from miles.hooks import load_function
from miles.rollout.rm_hub.answers import RESPONSE_STARTS, THINKING_ENDS
from miles.rollout.rm_hub.reasoning_gym import HOW_TO_INSTALL, is_installed
from miles.rollout.rm_hub.rm_types import BOXED, find, is_known, known_types


def check(settings: Settings, problems: Problems) -> None:
    """Imports the custom function. A type that a row names is only known when its sample comes."""
    reward = settings.reward
    _check_hook("--custom-reward-post-process-path", reward.custom_reward_post_process_path, problems)
    if reward.rm_retries < 0:
        problems.add("--rm-retries", reward.rm_retries, "must not be negative", "0 or more works")
    if reward.custom_rm_path:
        _check_hook("--custom-rm-path", reward.custom_rm_path, problems)
        if any(dataset.rm_type for dataset in settings.eval_datasets):
            problems.warn("--eval-config: rm_type has no effect beside --custom-rm-path")
        return
    for dataset in settings.eval_datasets:
        if dataset.rm_type is not None and not is_known(dataset.rm_type):
            flag = f"--eval-config {dataset.name} rm_type"
            problems.add(flag, dataset.rm_type, "there is no such reward type", f"{known_types()} work")
    if reward.group_rm:
        problems.warn("--group-rm has no effect without --custom-rm-path: shipped types score one sample at a time")
    if reward.rm_type is None:
        if _has_no_reward(settings):
            problems.add(
                "--rm-type", None, "nor is --custom-rm-path, so samples get no reward", f"{known_types()} work"
            )
    elif not is_known(reward.rm_type):
        problems.add("--rm-type", reward.rm_type, "there is no such reward type", f"{known_types()} work")
    else:
        _check_type(reward.rm_type, settings, problems)


def _check_hook(flag: str, path: str | None, problems: Problems) -> None:
    try:
        load_function(path)
    except HookError as error:
        problems.add(flag, path, str(error), "module.function works")


def _check_type(rm_type: str, settings: Settings, problems: Problems) -> None:
    """What a type needs besides its name."""
    kind, reward = find(rm_type), settings.reward
    if kind.labelled and settings.data.label_key is None:
        problems.add("--label-key", None, f"--rm-type {rm_type} compares with a label", "--label-key label works")
    if kind.function is None and not reward.rm_url:
        problems.add("--rm-url", None, f"--rm-type {rm_type} asks a server", "--rm-url http://host:port/path works")
    if kind.function is not None and reward.rm_url:
        problems.warn(f"--rm-url has no effect on samples of --rm-type {rm_type}: only remote_rm asks a server")
    if kind.keys and not reward.custom_reward_post_process_path:
        keys = " or ".join(kind.keys)
        for flag, key in (("--reward-key", reward.reward_key), ("--eval-reward-key", reward.eval_reward_key)):
            if key not in kind.keys and (key is not None or flag == "--reward-key"):
                problems.add(
                    flag, key, f"the reward of {rm_type} is an object, of which one number is trained", f"{keys} works"
                )
    if rm_type == "deepscaler":
        problems.warn(
            f"--rm-type deepscaler: a reply without {THINKING_ENDS} or {RESPONSE_STARTS} gets 0, so a model that doesn't "
            "write them learns nothing; --rm-type math has no such rule"
        )
    if rm_type.removeprefix(BOXED) == "reasoning_gym" and not is_installed():
        problems.add("--rm-type", rm_type, HOW_TO_INSTALL.partition(";")[0], 'pip install "miles[reasoning-gym]" works')


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
