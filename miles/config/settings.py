"""All settings, one frozen class per owner, under the names that launch scripts use; sizes are derived, never stored.

`Settings.parse(argv)` is the way in from a command line. Below it, code takes these objects or plain values; the
flat `namespace()` goes to users' hooks alone.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from miles.config import command_line, flags, known
from miles.config.command_line import Passed
from miles.config.flags import flag
from miles.config.problems import Problems

FULLY_ASYNC_PATHS = (
    "miles.rollout.fully_async_rollout.FullyAsyncRolloutFn",
    "miles.rollout.fully_async_rollout.generate_rollout_fully_async",
    "fully_async_rollout.generate_rollout_fully_async",
)
FIRST_ERA_PATHS = FULLY_ASYNC_PATHS[1:]
Mode = Literal["sync", "one_step_off", "fully_async", "function"]


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
        "how weights reach engines; auto: shared memory for local engines, disk for sglang and vllm",
        choices=("auto", "shm", "disk"),
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
    advantage_estimator: str = flag("grpo", "advantage estimator", choices=("grpo",))
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
    calculate_per_token_loss: bool = flag(False, "average the loss over tokens, not over samples")
    entropy_coef: float = flag(0.0, "weight of the entropy bonus")
    use_rollout_logprobs: bool = flag(
        False, "the engine's log-probs are the denominator of the ratio (the async default)"
    )
    use_tis: bool = flag(
        False, "the trainer's own log-probs are the denominator, weighted by truncated importance sampling"
    )
    tis_clip: float = flag(2.0, "upper bound of the importance weight", positive=True)
    tis_clip_low: float = flag(0.0, "lower bound of the importance weight")


@dataclass(frozen=True)
class EvalSettings:
    """Evaluation"""

    eval_interval: int | None = flag(None, "training steps between evaluations", positive=True)
    eval_prompt_data: tuple[str, ...] = flag((), "NAME PATH pairs of evaluation files")
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


@dataclass(frozen=True)
class CheckpointSettings:
    """Checkpoints"""

    load: str | None = flag(None, "run folder, checkpoints folder or one step to resume from")
    ref_load: str | None = flag(None, "frozen reference policy; KL terms alone use one")
    save: str | None = flag(None, "folder for checkpoints; unset: in the run folder")
    save_interval: int | None = flag(None, "training steps between checkpoints; unset: one at the end", positive=True)
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
    use_tensorboard: bool = flag(False, "write tensorboard events into the run folder")
    shutdown_timeout_s: float = flag(30.0, "seconds that an ordered shutdown may take", positive=True)


@dataclass(frozen=True)
class Settings:
    """Everything a run is told.

    ``sources``: where each setting that was given comes from, by name (a flag, or file and line); ``passthrough``: flags
    of sglang and its router with their values (True without one), as given; ``attributes``: what hooks get besides.
    """

    model: ModelSettings = field(default_factory=ModelSettings)
    data: DataSettings = field(default_factory=DataSettings)
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    rollout: RolloutSettings = field(default_factory=RolloutSettings)
    reward: RewardSettings = field(default_factory=RewardSettings)
    engine: EngineSettings = field(default_factory=EngineSettings)
    train: TrainSettings = field(default_factory=TrainSettings)
    eval: EvalSettings = field(default_factory=EvalSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    run: RunSettings = field(default_factory=RunSettings)
    sources: Mapping[str, str] = field(default_factory=dict)
    passthrough: Mapping[str, Passed] = field(default_factory=dict)
    attributes: Mapping[str, Any] = field(default_factory=dict)
    program: Literal["train", "train_async"] = "train_async"

    @classmethod
    def from_namespace(cls, args: Any) -> Settings:
        """Settings from the flat ``args`` of a first-era caller; what it lacks, or is None, keeps its default."""
        parts, others = {}, dict(vars(args))
        for name, owner in cls.owners().items():
            given = {f.name: others.pop(f.name) for f in fields(owner) if f.name in others}
            if owner is DataSettings and isinstance(given.get("prompt_data"), str):
                given["prompt_data"] = (given["prompt_data"],)
            parts[name] = owner(**{k: v for k, v in given.items() if v is not None})
        return cls(**parts, attributes=others)

    @classmethod
    def owners(cls) -> dict[str, type]:
        """Field name to settings class, in the order of the help text."""
        made: dict[str, Any] = {f.name: f.default_factory for f in fields(cls)}
        return {name: owner for name, owner in made.items() if isinstance(owner, type) and owner is not dict}

    @classmethod
    def parser(cls, prog: str = "miles train") -> argparse.ArgumentParser:
        return command_line.build_parser(list(cls.owners().values()), prog)

    @classmethod
    def parse(
        cls, argv: Sequence[str], problems: Problems, program: Literal["train", "train_async"] = "train_async"
    ) -> Settings:
        """Settings from a command line; what can't be read is a problem and keeps its default, so that checks go on."""
        given = command_line.read(argv, list(cls.owners().values()), problems)
        more: Any = {"sources": given.sources, "later": {r.flag: r.field.metadata["choices"] for r in known.rows()}}
        parts = {
            name: owner(**flags.convert(flags.hinted(owner), given.values, problems, **more))
            for name, owner in cls.owners().items()
        }
        others = [(r.field, r.hint) for r in cls.known_rows()]
        attributes = given.attributes | flags.convert(others, given.values, problems, **more)
        return cls(
            **parts, sources=given.sources, passthrough=given.passthrough, attributes=attributes, program=program
        )

    @classmethod
    def known_rows(cls) -> list[known.Row]:
        """The flags that launch scripts use and that are no settings."""
        return known.rows_outside(
            flags.flag_name(f) for owner in cls.owners().values() for f in flags.flag_fields(owner)
        )

    @property
    def given(self) -> frozenset[str]:
        """The names of the settings that the user set."""
        return frozenset(f.name for owner in self.owners().values() for f in fields(owner)) & self.sources.keys()

    def parts(self) -> list[Any]:
        """One instance of each owner's settings."""
        return [getattr(self, name) for name in self.owners()]

    # ---- sizes, derived

    @property
    def max_prompt_len(self) -> int | None:
        """Most tokens of a training prompt; None: no bound."""
        context = self.sampling.rollout_max_context_len
        return self.sampling.rollout_max_prompt_len or (None if context is None else context - 1)

    @property
    def chat_template_file(self) -> str | None:
        """None: the tokenizer's own template, which is what "autofix" means today."""
        path = self.data.chat_template_path
        return None if path == "autofix" else path

    @property
    def batch_samples(self) -> int:
        """Samples per training step: ``rollout_batch_size * n_samples_per_prompt``."""
        return (self.rollout.rollout_batch_size or 0) * self.rollout.n_samples_per_prompt

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps per training step (batch)."""
        if self.train.num_steps_per_rollout:
            return self.train.num_steps_per_rollout
        return max(1, self.batch_samples // (self.train.global_batch_size or self.batch_samples or 1))

    @property
    def samples_per_optimizer_step(self) -> int:
        return self.batch_samples // self.optimizer_steps

    @property
    def slots(self) -> int:
        """Samples that may run at a time."""
        return self.rollout.async_max_concurrent_samples or self.batch_samples

    @property
    def buffer_groups(self) -> int:
        """Finished groups that may wait before no new group starts."""
        return int(self.rollout.async_data_buffer_capacity_factor * (self.rollout.rollout_batch_size or 0))

    @property
    def retry_unused(self) -> bool:
        """Groups that got too old are issued again (within the budget), not dropped."""
        handler = self.rollout.async_unused_samples_handler
        return handler == "retry" or (handler is None and self.rollout.rollout_function_path in FIRST_ERA_PATHS)

    @property
    def fully_async(self) -> bool:
        """Both selectors: the flag and the function path of either era."""
        return self.rollout.fully_async or self.rollout.rollout_function_path in FULLY_ASYNC_PATHS

    @property
    def mode(self) -> Mode:
        """Which bounds the ring runs under; all modes are one ring."""
        if self.fully_async:
            return "fully_async"
        if self.rollout.rollout_function_path:
            return "function"
        return "sync" if self.program == "train" else "one_step_off"

    @property
    def staleness_bound(self) -> int | None:
        """K: the largest age, in weight versions, of anything that is trained; None: no bound."""
        bounds = {"sync": 0, "one_step_off": 1, "function": None, "fully_async": self.rollout.max_weight_staleness}
        return bounds[self.mode]

    @property
    def eval_sets(self) -> tuple[tuple[str, str], ...]:
        """(name, path) of each evaluation file; a single value gets the name "aime", as launch scripts expect."""
        words = self.eval.eval_prompt_data
        if len(words) == 1:
            return (("aime", words[0]),)
        return tuple(zip(words[::2], words[1::2], strict=False))

    @property
    def num_engines(self) -> int:
        return max(1, (self.engine.rollout_num_gpus or 1) // self.engine.rollout_num_gpus_per_engine)

    @property
    def trainer_ranks(self) -> int:
        return self.train.actor_num_nodes * (self.train.actor_num_gpus_per_node or 1)

    def sampling_params(self) -> dict[str, Any]:
        """SGLang sampling parameters of a training sample."""
        s = self.sampling
        return {
            "temperature": s.rollout_temperature,
            "top_p": s.rollout_top_p,
            "top_k": s.rollout_top_k,
            "max_new_tokens": s.rollout_max_response_len,
            "stop": list(s.rollout_stop) or None,
            "stop_token_ids": list(s.rollout_stop_token_ids) or None,
            "skip_special_tokens": s.rollout_skip_special_tokens,
            "no_stop_trim": True,
            "spaces_between_special_tokens": False,
        }

    def eval_sampling_params(self) -> dict[str, Any]:
        """The same for evaluation: what is unset there is as in training."""
        e = self.eval
        own = {
            "temperature": e.eval_temperature,
            "top_p": e.eval_top_p,
            "top_k": e.eval_top_k,
            "max_new_tokens": e.eval_max_response_len,
        }
        return self.sampling_params() | {k: v for k, v in own.items() if v is not None}

    # ---- ways out

    def namespace(self, **more: Any) -> argparse.Namespace:
        """The flat ``args`` that users' hooks get, with the derived names that they read."""
        flat = {r.field.name: flags.default_of(r.field) for r in self.known_rows()}
        flat |= {name.lstrip("-").replace("-", "_"): value for name, value in self.passthrough.items()}
        flat.update(self.attributes)
        for name in self.owners():
            flat |= {f.name: getattr(getattr(self, name), f.name) for f in fields(getattr(self, name))}
        if len(self.data.prompt_data) < 2:
            flat["prompt_data"] = next(iter(self.data.prompt_data), None)
        flat["rollout_max_prompt_len"] = self.max_prompt_len
        flat["chat_template_path"] = self.chat_template_file
        flat["eps_clip_high"] = self.train.eps_clip_high or self.train.eps_clip
        flat["eval_reward_key"] = self.reward.eval_reward_key or self.reward.reward_key
        flat["global_batch_size"] = self.samples_per_optimizer_step
        flat["rollout_num_gpus"] = self.num_engines * self.engine.rollout_num_gpus_per_engine
        flat["actor_num_gpus_per_node"] = self.train.actor_num_gpus_per_node or 1
        flat["async_unused_samples_handler"] = "retry" if self.retry_unused else "drop"
        return argparse.Namespace(**(flat | more))

    def to_json(self) -> str:
        """What ``settings.json`` of a run folder holds."""
        return json.dumps(
            {n: asdict(getattr(self, n)) for n in self.owners()}
            | {"given": sorted(self.given), "passthrough": self.passthrough, "attributes": self.attributes},
            indent=2,
            default=str,
        )
