"""Settings in; out comes what was given but changes nothing, and what was given but can't be had here."""

from __future__ import annotations

from typing import Any

from miles.config import flags
from miles.config.problems import Problems
from miles.config.settings import Settings

REASONS = {
    "not here yet": "is not here yet",
    "needs megatron": "changes what is computed or stored, and needs the megatron backend, which is not here",
    "needs sglang": "needs the sglang backend, and is not here yet",
}
NEEDS = {
    "apply_chat_template_kwargs": "apply_chat_template",
    "tis_clip": "use_tis",
    "tis_clip_low": "use_tis",
    "opsm_delta": "use_opsm",
    "kl_loss_coef": "use_kl_loss",
    "use_unbiased_kl": "use_kl_loss",
    "grpo_std_normalization": "rewards_normalization",
    "eval_reward_key": "eval_interval",
    "eval_function_path": "eval_interval",
    "custom_eval_rollout_log_function_path": "eval_interval",
    "eval_input_key": "eval_interval",
    "eval_label_key": "eval_interval",
    "n_samples_per_eval_prompt": "eval_interval",
    "eval_temperature": "eval_interval",
    "eval_top_p": "eval_interval",
    "eval_top_k": "eval_interval",
    "eval_max_response_len": "eval_interval",
    "eval_max_context_len": "eval_interval",
    "eval_min_new_tokens": "eval_interval",
    "eval_max_prompt_len": "eval_interval",
    "eval_tool_key": "eval_interval",
    "eval_config": "eval_interval",
    "tb_project_name": "use_tensorboard",
    "tb_experiment_name": "use_tensorboard",
    "wandb_mode": "use_wandb",
    "wandb_dir": "use_wandb",
    "wandb_key": "use_wandb",
    "wandb_host": "use_wandb",
    "wandb_team": "use_wandb",
    "wandb_group": "use_wandb",
    "wandb_project": "use_wandb",
    "wandb_run_id": "use_wandb",
    "wandb_random_suffix": "use_wandb",
    "wandb_always_use_train_step": "use_wandb",
    "trackio_project": "use_trackio",
}
"""Settings that say nothing without another one."""
UNLESS = {
    "num_epoch": "num_rollout",
    "eval_prompt_data": "eval_config",
    "micro_batch_size": "max_tokens_per_gpu",
    "custom_reward_post_process_path": "custom_convert_samples_to_train_data_path",
    "get_mismatch_metrics": "use_tis",
    "tis_clip": "custom_tis_function_path",
    "tis_clip_low": "custom_tis_function_path",
}
"""Settings that say nothing beside another one."""


def check(settings: Settings, problems: Problems) -> None:
    """Judges every flag that was given: by its row in the table of known flags, or by what its setting depends on."""
    _check_others(settings, problems)
    _warn_of_idle(settings, problems)


def _check_others(settings: Settings, problems: Problems) -> None:
    """Flags that are no settings: what would change results is a problem, the rest shares one warning."""
    changed, idle = _changed(settings), []
    for row in settings.known_rows():
        name = row.field.name
        if name not in settings.sources or name not in settings.attributes:
            continue
        says_nothing = row.flag not in changed or (row.under is not None and row.under not in changed)
        if row.idle_in == settings.mode:
            problems.warn(f"{row.flag} has no effect in a {settings.mode} run")
        elif row.kind == "no effect" or says_nothing:
            idle.append(row.flag)
        else:
            flag, value = flags.place(row.flag, settings.sources[name]), settings.attributes[name]
            problems.add(flag, "" if row.hint is bool else value, REASONS[row.kind], row.text)
    if idle:
        problems.warn(f"no effect on results under --train-backend {settings.train.train_backend}: {', '.join(idle)}")


def _changed(settings: Settings) -> set[str]:
    """The flags whose values are not their defaults."""
    others = [(row.field, settings.attributes) for row in settings.known_rows()]
    own = [(setting, vars(part)) for part in settings.parts() for setting in flags.flag_fields(type(part))]
    return {
        flags.flag_name(setting)
        for setting, values in [*others, *own]
        if values.get(setting.name, default := flags.default_of(setting)) != default
    }


def _warn_of_idle(settings: Settings, problems: Problems) -> None:
    """Settings that were given and that another one makes meaningless."""
    values: dict[str, Any] = {}
    names: dict[str, str] = {}
    for part in settings.parts():
        values |= vars(part)
        names |= {setting.name: flags.flag_name(setting) for setting in flags.flag_fields(type(part))}
    for word, pairs, idle in (("without", NEEDS, False), ("beside", UNLESS, True)):
        for name, other in pairs.items():
            if name in settings.given and bool(values[other]) is idle:
                problems.warn(f"{names[name]} has no effect {word} {names[other]}")
