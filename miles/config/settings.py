"""All settings of a run; sizes are derived from them, never stored.

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
from miles.config.eval_config import EvalDataset, read_datasets
from miles.config.owners import (
    CheckpointSettings,
    DataSettings,
    DebugSettings,
    EngineSettings,
    EvalSettings,
    ModelSettings,
    RewardSettings,
    RolloutSettings,
    RunSettings,
    SamplingSettings,
    TrainSettings,
)
from miles.config.problems import Problems

FULLY_ASYNC_PATHS = (
    "miles.rollout.fully_async_rollout.FullyAsyncRolloutFn",
    "miles.rollout.fully_async_rollout.generate_rollout_fully_async",
    "fully_async_rollout.generate_rollout_fully_async",
)
FIRST_ERA_PATHS = FULLY_ASYNC_PATHS[1:]
Mode = Literal["sync", "one_step_off", "fully_async", "function"]


@dataclass(frozen=True)
class Settings:
    """Everything a run is told.

    ``configured_sets``: the evaluation sets of ``--eval-config``; ``sources``: where each setting that was given comes
    from, by name (a flag, or file and line); ``passthrough``: flags of sglang and its router with their values (True
    without one), as given; ``attributes``: what hooks get besides.
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
    debug: DebugSettings = field(default_factory=DebugSettings)
    configured_sets: tuple[EvalDataset, ...] = ()
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
        config = given.values.get("eval_config")
        return cls(
            **parts,
            configured_sets=() if config is None else read_datasets(config, problems),
            sources=given.sources,
            passthrough=given.passthrough,
            attributes=attributes,
            program=program,
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
    def staleness_policy(self) -> str:
        """Which `miles.rollout.staleness_policy` keeps the bound. One step off takes its blocks in order: it waits."""
        return "wait" if self.mode == "one_step_off" else self.rollout.staleness_policy

    @property
    def eval_reward_key(self) -> str | None:
        """Under which key a reward object of an evaluation holds the number that counts."""
        return self.reward.eval_reward_key or self.reward.reward_key

    @property
    def eval_flag(self) -> str:
        """What names the evaluation files."""
        return "--eval-prompt-data" if self.eval.eval_config is None else "--eval-config"

    @property
    def eval_datasets(self) -> tuple[EvalDataset, ...]:
        """The sets of ``--eval-config``, else those of ``--eval-prompt-data``, where a path alone has the name "aime", as
        launch scripts expect."""
        words = self.eval.eval_prompt_data
        if self.eval.eval_config is not None:
            return self.configured_sets
        if len(words) == 1:
            return (EvalDataset("aime", words[0]),)
        return tuple(EvalDataset(name, path) for name, path in zip(words[::2], words[1::2], strict=False))

    @property
    def num_engines(self) -> int:
        """Engines that the run starts: none where samples come from files."""
        if self.debug.load_debug_rollout_data is not None:
            return 0
        return max(1, (self.engine.rollout_num_gpus or 1) // self.engine.rollout_num_gpus_per_engine)

    @property
    def trainer_ranks(self) -> int:
        return self.train.actor_num_nodes * (self.train.actor_num_gpus_per_node or 1)

    @property
    def uses_reference(self) -> bool:
        """A term of the loss or of the advantages has a KL to a reference policy, so one is loaded."""
        t = self.train
        penalty = t.kl_coef and t.advantage_estimator.startswith("reinforce_plus_plus")
        loss = t.use_kl_loss and t.kl_loss_coef and t.loss_type != "sft_loss"
        return bool(penalty or loss)

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
            "min_new_tokens": e.eval_min_new_tokens,
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
        flat["eval_datasets"] = list(self.eval_datasets)
        flat["eval_reward_key"] = self.eval_reward_key
        flat["global_batch_size"] = self.samples_per_optimizer_step
        flat["rollout_num_gpus"] = self.num_engines * self.engine.rollout_num_gpus_per_engine
        flat["actor_num_gpus_per_node"] = self.train.actor_num_gpus_per_node or 1
        flat["async_unused_samples_handler"] = "retry" if self.retry_unused else "drop"
        return argparse.Namespace(**(flat | more))

    def shown(self) -> dict[str, Any]:
        """Everything, by owner, as files and trackers may hold it: secrets are masked."""
        parts = zip(self.owners(), self.parts(), strict=True)
        shown = {name: {f.name: flags.shown(f, vars(part)[f.name]) for f in fields(part)} for name, part in parts}
        return shown | {
            "eval_datasets": [asdict(dataset) for dataset in self.configured_sets],
            "given": sorted(self.given),
            "passthrough": self.passthrough,
            "attributes": self.attributes,
        }

    def to_json(self) -> str:
        """What ``settings.json`` of a run folder holds."""
        return json.dumps(self.shown(), indent=2, default=str)
