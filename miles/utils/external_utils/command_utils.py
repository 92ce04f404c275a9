"""Door: what Python launch scripts import as ``U``."""

from miles.launch import (
    ExecuteTrainConfig,
    convert_checkpoint,
    create_run_id,
    dataclass_cli,
    exec_command_cpu,
    execute_train,
    get_default_wandb_args,
    hf_download_dataset,
    repo_base_dir,
)

__all__ = [
    "ExecuteTrainConfig",
    "convert_checkpoint",
    "create_run_id",
    "dataclass_cli",
    "exec_command_cpu",
    "execute_train",
    "get_default_wandb_args",
    "hf_download_dataset",
    "repo_base_dir",
]
