"""What each room is told: one frozen class of settings per owner, under the names that launch scripts use.

A field is a flag (`flags.flag`): its default and meaning stand here and nowhere else. `settings.Settings` holds them all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from miles.config.flags import flag


@dataclass(frozen=True)
class ModelSettings:
    """Model"""

    hf_checkpoint: str | None = flag(None, "folder with the HF model and tokenizer that training starts from")
    dtype: str = flag(
        "auto",
        "compute type of trainer and engines; auto: the checkpoint's own, float32 where a CPU has no bf16 units",
        choices=("auto", "float32", "bfloat16"),
    )
    freeze_embeddings: bool = flag(False, "don't train the embeddings (nor a head tied to them)")
    seed: int = flag(1234, "seed of the trainer")
    torch_threads: int = flag(1, "torch threads of each process on a CPU", positive=True)


@dataclass(frozen=True)
class DataSettings:
    """Prompts"""

    data_source_path: str = flag(
        "miles.rollout.data_source.RolloutDataSourceWithBuffer", "module.name of a DataSource class"
    )
    rollout_global_dataset: bool = flag(
        True, "no prompt data: samples start empty, hooks fill them in", name="--disable-rollout-global-dataset"
    )
    prompt_data: tuple[str, ...] = flag(
        (),
        "training prompts, one or several of PATH.jsonl, PATH.parquet or reasoning_gym:TASKS, with @[a:b] and *weight",
    )
    input_key: str = flag("input", "key of the prompt: text or a list of chat messages")
    label_key: str | None = flag(None, "key of the label")
    metadata_key: str = flag("metadata", "key of the metadata object")
    tool_key: str = flag("tools", "key of the list of tools that the chat template renders")
    apply_chat_template: bool = flag(False, "render prompts with the tokenizer's chat template")
    apply_chat_template_kwargs: dict[str, Any] = flag({}, "JSON object of arguments for the chat template")
    chat_template_path: str | None = flag(None, "file with a chat template in the place of the tokenizer's")
    rollout_shuffle: bool = flag(False, "shuffle the prompts anew in each epoch")
    rollout_seed: int = flag(42, "seed of the shuffle and of sampling")
    buffer_filter_path: str | None = flag(None, "module.name of a function that picks from groups that were given back")
    num_epoch: int | None = flag(None, "epochs to train; --num-rollout wins", positive=True)


@dataclass(frozen=True)
class SamplingSettings:
    """Sampling"""

    rollout_temperature: float = flag(1.0, "temperature of training samples", positive=True)
    rollout_top_p: float = flag(1.0, "nucleus of training samples")
    rollout_top_k: int = flag(-1, "top-k of training samples; -1: off")
    rollout_max_response_len: int | None = flag(None, "most tokens of a response", positive=True)
    rollout_max_context_len: int | None = flag(None, "most tokens of prompt plus response", positive=True)
    rollout_max_prompt_len: int | None = flag(
        None,
        "rows with more tokens are passed over; unset: --rollout-max-context-len - 1, if that is set",
        positive=True,
    )
    rollout_stop: tuple[str, ...] = flag((), "texts that end a response")
    rollout_stop_token_ids: tuple[int, ...] = flag((), "token ids that end a response")
    rollout_skip_special_tokens: bool = flag(False, "leave special tokens out of the response text")


@dataclass(frozen=True)
class RolloutSettings:
    """Rollout and its schedule"""

    fully_async: bool = flag(False, "generation never stops while the policy trains")
    rollout_function_path: str | None = flag(None, "module.name of a rollout function")
    num_rollout: int | None = flag(None, "training steps", positive=True)
    rollout_batch_size: int | None = flag(None, "prompts (groups) per training step", positive=True)
    n_samples_per_prompt: int = flag(1, "samples per prompt", positive=True)
    max_weight_staleness: int | None = flag(
        None, "no trained token is older than this many weight versions; unset: no bound"
    )
    staleness_policy: str = flag("evict", "what happens to a group that got too old", choices=("evict", "wait", "mask"))
    async_max_concurrent_samples: int | None = flag(None, "most running samples; unset: one batch", positive=True)
    async_data_buffer_capacity_factor: float = flag(2.0, "finished groups that may wait, in batches", positive=True)
    async_unused_samples_handler: str | None = flag(
        None,
        "what becomes of groups that got too old: drop, or retry (drop; retry for the first-era path)",
        choices=("retry", "drop"),
    )
    rollout_submission_granularity: str = flag(
        "sample", "what frees a slot: each sample, or the whole group", choices=("group", "sample")
    )
    partial_rollout: bool = flag(False, "a retried sample goes on from its tokens")
    rollout_partial_groups: bool = flag(False, "train groups with at least two survivors")
    rollout_retry_budget: int = flag(2, "attempts after the first, per sample")
    rollout_failure_limit: int = flag(
        16, "the run stops when more than this many groups in a row are given up", positive=True
    )
    rollout_sample_timeout_s: float = flag(3600.0, "seconds a sample may take, tools included", positive=True)
    custom_generate_function_path: str | None = flag(None, "module.name of a generate function")
    dynamic_sampling_filter_path: str | None = flag(None, "module.name of a filter that rejects finished groups")
    custom_rollout_log_function_path: str | None = flag(
        None, "module.name of a function that gets the samples of each batch; true: no metrics of theirs are logged"
    )
    rollout_sample_filter_path: str | None = flag(
        None, "module.name of a function that marks samples of a batch whose tokens are not trained"
    )
    custom_async_data_buffer_path: str | None = flag(
        None, "module.name of a DataBuffer class that finished groups of a fully-async run wait in"
    )


@dataclass(frozen=True)
class RewardSettings:
    """Rewards"""

    rm_type: str | None = flag(
        None,
        "reward of a sample: math, exact_match, dapo, deepscaler, gemma_math, f1, gpqa, ifbench, reasoning_gym, random, "
        "deterministic_random, remote_rm; boxed_... scores the last box alone",
    )
    rm_url: str | None = flag(None, "server that remote_rm posts {prompt, response, label} to")
    rm_concurrency: int = flag(64, "most requests to that server at a time", positive=True)
    rm_timeout_s: float = flag(60.0, "seconds that server may take for one reply", positive=True)
    rm_retries: int = flag(5, "more tries after a broken connection, a 5xx or no reply in time")
    custom_rm_path: str | None = flag(None, "module.name of a reward function")
    group_rm: bool = flag(False, "score the samples of a group together")
    reward_key: str | None = flag(None, "key of the reward that is trained, where rewards are objects")
    eval_reward_key: str | None = flag(None, "the same for evaluation; unset: --reward-key")
    custom_reward_post_process_path: str | None = flag(
        None, "module.name of a function that turns the rewards of a batch into those that are trained"
    )
    custom_convert_samples_to_train_data_path: str | None = flag(
        None, "module.name of a function that turns the samples of a batch into what is trained"
    )
    reward_timeout_s: float = flag(5.0, "hard limit for checking one answer, in seconds", positive=True)
    reward_processes: int = flag(1, "processes that check answers", positive=True)


@dataclass(frozen=True)
class EngineSettings:
    """Engines"""

    rollout_backend: str = flag(
        "auto",
        "inference server; auto: sglang where CUDA and sglang are there, else local",
        choices=("auto", "local", "sglang", "vllm"),
    )
    engine_python: str | None = flag(None, "interpreter of the environment that holds sglang or vllm; unset: this one")
    rollout_num_gpus: int | None = flag(None, "devices for engines; unset without accelerators: 1", positive=True)
    rollout_num_gpus_per_engine: int = flag(1, "devices per engine", positive=True)
    engine_wait_s: float = flag(300.0, "seconds a run lives with no engine in the routing", positive=True)
    pause_generation_mode: str = flag(
        "retract", "what running requests do at a weight update", choices=("abort", "retract", "in_place")
    )
    update_weights_interval: int = flag(1, "training steps per weight publication", positive=True)
    update_weight_transfer_mode: str = flag(
        "auto",
        "how weights reach engines; auto: shared memory for local engines, disk for sglang and vllm; broadcast: a process "
        "group of trainer rank 0 and all engines; where p2p is not here yet, auto takes its place",
        choices=("auto", "shm", "disk", "broadcast", "p2p"),
    )
    update_weight_buffer_size: int = flag(
        536870912, "most bytes of tensors in one bucket of mode broadcast", positive=True
    )
    update_weight_disk_dir: str | None = flag(
        None, "folder for published weights in mode disk; unset: in the run folder"
    )
    sglang_router_ip: str = flag("127.0.0.1", "address of the router that hooks use")
    sglang_router_port: int = flag(0, "port of that router; 0: a free one")
    sglang_max_running_requests: int = flag(256, "most requests that one engine runs at a time", positive=True)
    sglang_max_total_tokens: int | None = flag(
        None, "KV cache of one engine, in tokens; unset: from the context length", positive=True
    )
    deterministic_mode: bool = flag(
        False, "local engines sample the same for a prompt and seed, whatever else runs; costs prefix sharing and speed"
    )
    rollout_health_check_interval: float = flag(30.0, "seconds between health checks of an engine", positive=True)
    rollout_health_check_timeout: float = flag(30.0, "seconds a health check may take", positive=True)
    engine_start_timeout_s: float | None = flag(
        None, "seconds an engine may take to start; unset: 120 for local, 1800 for sglang and vllm", positive=True
    )


@dataclass(frozen=True)
class TrainSettings:
    """Training"""

    train_backend: str = flag("fsdp", "trainer", choices=("fsdp",))
    actor_num_nodes: int = flag(1, "nodes of the trainer", positive=True)
    actor_num_gpus_per_node: int | None = flag(
        None, "trainer ranks per node; unset without accelerators: 1", positive=True
    )
    global_batch_size: int | None = flag(None, "samples per optimizer step; unset: the whole batch", positive=True)
    num_steps_per_rollout: int | None = flag(None, "optimizer steps per batch; unset: 1", positive=True)
    micro_batch_size: int = flag(1, "samples per micro-batch, where --max-tokens-per-gpu is unset", positive=True)
    use_dynamic_batch_size: bool = flag(False, "fill micro-batches up to --max-tokens-per-gpu")
    max_tokens_per_gpu: int | None = flag(None, "most tokens in a micro-batch", positive=True)
    lr: float = flag(1e-6, "learning rate", positive=True)
    min_lr: float = flag(0.0, "learning rate at the end of its decay")
    lr_decay_style: str = flag("constant", "learning rate over the run", choices=("constant", "linear", "cosine"))
    lr_warmup_iters: int = flag(0, "steps of linear warm-up")
    weight_decay: float = flag(0.0, "AdamW weight decay")
    adam_beta1: float = flag(0.9, "AdamW beta 1")
    adam_beta2: float = flag(0.95, "AdamW beta 2")
    adam_eps: float = flag(1e-8, "AdamW epsilon", positive=True)
    clip_grad: float = flag(1.0, "largest gradient norm; 0: no clipping")
    advantage_estimator: str = flag(
        "grpo",
        "how rewards become advantages",
        choices=("grpo", "gspo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"),
    )
    compute_advantages_and_returns: bool = flag(
        True, "no advantages: for losses that need none", name="--disable-compute-advantages-and-returns"
    )
    normalize_advantages: bool = flag(False, "whiten advantages over all trained tokens of the training step")
    gamma: float = flag(1.0, "discount per token of reinforce_plus_plus", positive=True)
    grpo_std_normalization: bool = flag(
        True,
        "don't divide advantages by the standard deviation of their group",
        name="--disable-grpo-std-normalization",
    )
    rewards_normalization: bool = flag(
        True, "use rewards as advantages, unnormalized", name="--disable-rewards-normalization"
    )
    eps_clip: float = flag(0.2, "lower clip of the ratio", positive=True)
    eps_clip_high: float | None = flag(None, "upper clip of the ratio; unset: --eps-clip", positive=True)
    eps_clip_c: float | None = flag(None, "dual clip of the ratio for negative advantages; above 1")
    loss_type: str = flag("policy_loss", "what is minimised", choices=("policy_loss", "sft_loss", "custom_loss"))
    custom_loss_function_path: str | None = flag(None, "module.name of the loss of --loss-type custom_loss")
    calculate_per_token_loss: bool = flag(False, "average the loss over tokens, not over samples")
    custom_pg_loss_reducer_function_path: str | None = flag(
        None, "module.name of a function that makes the sum over samples of the policy loss"
    )
    kl_coef: float = flag(0.0, "weight of the KL to the reference in the advantages of the reinforce_plus_plus ones")
    use_kl_loss: bool = flag(False, "add the KL to the reference to the loss")
    kl_loss_coef: float = flag(0.0, "weight of that KL; 0: no reference is loaded")
    kl_loss_type: str = flag("k1", "estimate of the KL", choices=("k1", "k2", "k3", "low_var_kl"))
    use_unbiased_kl: bool = flag(False, "weight the KL of the loss by the ratio of the policy to the sampling one")
    ref_update_interval: int | None = flag(
        None, "training steps after which the policy becomes the reference; unset: never", positive=True
    )
    entropy_coef: float = flag(0.0, "weight of the entropy bonus")
    use_rollout_logprobs: bool = flag(
        False, "the engine's log-probs are the denominator of the ratio (the async default)"
    )
    use_tis: bool = flag(
        False, "the trainer's own log-probs are the denominator, weighted by truncated importance sampling"
    )
    tis_clip: float = flag(2.0, "upper bound of the importance weight", positive=True)
    tis_clip_low: float = flag(0.0, "lower bound of the importance weight")
    custom_tis_function_path: str | None = flag(
        None, "module.name of an off-policy correction in the place of the truncated weights of --use-tis"
    )
    get_mismatch_metrics: bool = flag(False, "without --use-tis: the metrics of that function, not its correction")
    use_opsm: bool = flag(False, "leave out samples of negative advantage that the policy has moved away from")
    opsm_delta: float = flag(1e-4, "mean log-ratio of engine to policy per token above which --use-opsm does so")


@dataclass(frozen=True)
class EvalSettings:
    """Evaluation"""

    eval_interval: int | None = flag(None, "training steps between evaluations", positive=True)
    eval_prompt_data: tuple[str, ...] = flag((), "NAME PATH pairs of evaluation files")
    eval_config: str | None = flag(
        None, "YAML or JSON file, or base64: and its text: evaluation files with settings of their own"
    )
    eval_function_path: str | None = flag(
        None, "module.name of a function that evaluates; unset: the evaluation files are sampled and scored"
    )
    custom_eval_rollout_log_function_path: str | None = flag(
        None, "module.name of a function that gets each evaluation; true: nothing else is logged of it"
    )
    skip_eval_before_train: bool = flag(False, "no evaluation before the first step")
    eval_input_key: str | None = flag(None, "key of the prompt in evaluation files; unset: --input-key")
    eval_label_key: str | None = flag(None, "key of the label in evaluation files; unset: --label-key")
    eval_tool_key: str | None = flag(None, "key of the tools in evaluation files; unset: --tool-key")
    n_samples_per_eval_prompt: int = flag(1, "samples per evaluation prompt", positive=True)
    eval_temperature: float | None = flag(None, "temperature; 0: greedy; unset: as in training")
    eval_top_p: float | None = flag(None, "nucleus; unset: as in training")
    eval_top_k: int | None = flag(None, "top-k; unset: as in training")
    eval_max_prompt_len: int | None = flag(
        None, "evaluation rows with more tokens are left out; unset: as in training", positive=True
    )
    eval_max_response_len: int | None = flag(None, "most tokens of a response; unset: as in training", positive=True)
    eval_max_context_len: int | None = flag(
        None, "most tokens of prompt plus response; unset: as in training", positive=True
    )
    eval_min_new_tokens: int | None = flag(None, "fewest tokens of a response")


@dataclass(frozen=True)
class CheckpointSettings:
    """Checkpoints"""

    load: str | None = flag(None, "run folder, checkpoints folder or one step to resume from")
    ref_load: str | None = flag(
        None, "frozen reference policy of KL terms, HF folder or checkpoint; unset: --hf-checkpoint"
    )
    save: str | None = flag(None, "folder for checkpoints; unset: in the run folder")
    save_interval: int | None = flag(None, "training steps between checkpoints; unset: one at the end", positive=True)
    save_trigger_sentinel: str | None = flag(
        None, "file that asks for a checkpoint after the step that runs; it is removed"
    )
    save_keep_last: int | None = flag(None, "newest checkpoints that stay; unset: all", positive=True)
    save_keep_every: int | None = flag(
        None, "checkpoints of every so many steps stay, whatever --save-keep-last says", positive=True
    )
    save_hf: str | None = flag(None, "folder for HF exports; {rollout_id} stands for the step")
    no_save_optim: bool = flag(False, "leave the optimizer out of checkpoints")


@dataclass(frozen=True)
class RunSettings:
    """Run folder and trackers"""

    run_name: str | None = flag(None, "name of the run; unset: date and time")
    run_dir: str = flag("runs", "folder of run folders")
    custom_config_path: str | None = flag(
        None, "YAML file, or base64: and its text: settings that win over flags, and attributes for hooks"
    )
    log_passrate: bool = flag(False, "log pass@k of training batches; a reward of 1 or more passes")
    log_reward_category: str | None = flag(
        None, "key of a category in reward objects: the share of each is logged as rollout/error_cat/CATEGORY"
    )
    use_tensorboard: bool = flag(False, "write tensorboard events into the run folder")
    tb_project_name: str | None = flag(None, "folder of these events below tensorboard/ in the run folder")
    tb_experiment_name: str | None = flag(None, "folder below that one")
    use_wandb: bool = flag(False, "log to Weights & Biases")
    wandb_mode: str | None = flag(
        None,
        "offline: files only, no network; unset: WANDB_MODE, else online",
        choices=("online", "offline", "disabled"),
    )
    wandb_dir: str | None = flag(None, "folder of wandb's files; unset: the run folder")
    wandb_key: str | None = flag(
        None, "key of the account; WANDB_API_KEY does the same and shows in no list of processes", secret=True
    )
    wandb_host: str | None = flag(None, "address of a wandb server of your own")
    wandb_team: str | None = flag(None, "team, or user, that the run belongs to")
    wandb_group: str | None = flag(None, "group and name of the run; unset: the name is the run folder's")
    wandb_project: str | None = flag(None, "project of the run")
    wandb_run_id: str | None = flag(None, "id of the run; unset: a random one, kept in the run folder")
    wandb_random_suffix: bool = flag(
        True, "leave the run's id out of group and name", name="--disable-wandb-random-suffix"
    )
    wandb_always_use_train_step: bool = flag(False, "draw evaluations over the axis of training steps")
    use_trackio: bool = flag(False, "log to trackio, on this machine")
    trackio_project: str = flag("miles", "project of the run there")
    shutdown_timeout_s: float = flag(30.0, "seconds that an ordered shutdown may take", positive=True)


@dataclass(frozen=True)
class DebugSettings:
    """Parts of a run, for debugging"""

    start_rollout_id: int | None = flag(
        None, "number of the first training step, from 0, where no checkpoint says it; prompts start from the first row"
    )
    debug_exit_after_rollout: int | None = flag(
        None,
        "the run ends in order after the training step of this number, from 0; schedules stay those of the whole run",
    )
    save_debug_rollout_data: str | None = flag(
        None, "file for the samples of each training step, {rollout_id} being its number; read it with torch.load"
    )
    load_debug_rollout_data: str | None = flag(
        None, "train the samples of such files in the place of new ones; no engine starts"
    )
    debug_rollout_only: bool = flag(
        False, "no trainer starts: every step is generated with the weights of --hf-checkpoint"
    )
