"""The nouns: a `Sample` (public and mutable, user hooks fill it in), and what the ring hands around (frozen)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, NamedTuple

from miles.errors import RewardFailed

Message = dict[str, Any]
Group = list[Any]
"""The samples of one prompt: ``Sample``, or a list of compact siblings in its place."""


class VersionSpan(NamedTuple):
    """Response tokens ``[start, end)`` sampled by the weights of ``version`` (None: the engine did not say)."""

    version: int | None
    start: int
    end: int


@dataclass
class RewardSpec:
    """Which reward a sample wants, where it differs from the run's."""

    rm_type: str | None = None
    custom_rm_path: str | None = None


@dataclass
class AdapterRef:
    """The adapter that a sample was drawn from."""

    name: str
    slot: int


@dataclass
class SpecInfo:
    """Speculative-decoding counters, summed over a sample's requests."""

    spec_accept_token_num: int = 0
    spec_draft_token_num: int = 0
    spec_verify_ct: int = 0
    completion_token_num: int = 0

    @property
    def spec_accept_rate(self) -> float:
        return self.spec_accept_token_num / self.spec_draft_token_num if self.spec_draft_token_num else 0.0

    @property
    def spec_accept_length(self) -> float:
        return self.completion_token_num / self.spec_verify_ct if self.spec_verify_ct else 0.0

    def add(self, meta: dict[str, Any]) -> None:
        self.spec_accept_token_num += meta.get("spec_accept_token_num", 0)
        self.spec_draft_token_num += meta.get("spec_draft_token_num", 0)
        self.spec_verify_ct += meta.get("spec_verify_ct", 0)
        self.completion_token_num += meta.get("completion_tokens", 0)

    def to_dict(self) -> dict[str, int]:
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def from_dict(cls, values: dict[str, int]) -> SpecInfo:
        return cls(**values)


@dataclass
class PrefixCacheInfo:
    """Prompt tokens that the engine did not have to compute again."""

    cached_tokens: int = 0
    total_prompt_tokens: int = 0

    @property
    def prefix_cache_hit_rate(self) -> float:
        return self.cached_tokens / self.total_prompt_tokens if self.total_prompt_tokens else 0.0

    def add(self, meta: dict[str, Any]) -> None:
        self.cached_tokens += meta.get("cached_tokens") or 0
        self.total_prompt_tokens += meta.get("prompt_tokens") or 0

    def to_dict(self) -> dict[str, int]:
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def from_dict(cls, values: dict[str, int]) -> PrefixCacheInfo:
        return cls(**values)


class Status(Enum):
    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


FINISH_STATUS = {"stop": Status.COMPLETED, "length": Status.TRUNCATED, "abort": Status.ABORTED}


@dataclass
class Sample:
    """One response to one prompt. ``tokens`` is prompt plus response; the response is its last ``response_length`` ids.

    ``loss_mask`` and ``rollout_log_probs`` have ``response_length`` entries. ``version_spans`` cover exactly the
    sampled response tokens; ``weight_versions`` holds the same as one decimal string per span.
    """

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: str | list[Message] = ""
    tokens: list[int] = field(default_factory=list)
    multimodal_inputs: dict[str, Any] | None = None
    multimodal_train_inputs: dict[str, Any] | None = None
    response: str = ""
    response_length: int = 0
    label: str | None = None
    reward: float | dict[str, Any] | None = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    rollout_routed_experts: Any = None
    rollout_indexer_topk: Any = None
    remove_sample: bool = False
    teacher_log_probs: list[float] | None = None
    opd_reverse_kl: list[float] | None = None
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    generate_function_path: str | None = None
    train_metadata: dict[str, Any] | None = None
    adapter: AdapterRef | None = None
    reward_spec: RewardSpec | None = None
    routing_key: str | None = None
    non_generation_time: float = 0.0
    spec_info: SpecInfo = field(default_factory=SpecInfo)
    prefix_cache_info: PrefixCacheInfo = field(default_factory=PrefixCacheInfo)
    version_spans: list[VersionSpan] = field(default_factory=list)
    submit_version: int | None = None

    Status = Status

    # ---- what was sampled, and by which weights

    @property
    def prompt_length(self) -> int:
        return len(self.tokens) - self.response_length

    @property
    def effective_response_length(self) -> int:
        return sum(self.loss_mask) if self.loss_mask is not None else self.response_length

    @property
    def oldest_weight_version(self) -> int | None:
        """The oldest of ``weight_versions`` that is a number; labels such as "default" say nothing."""
        return min((int(v) for v in self.weight_versions if str(v).isdigit()), default=None)

    @property
    def oldest_version(self) -> int | None:
        """The oldest version that any token can be from: the spans', and the submit version for what they don't know.

        A label alone may be that of a reply's end (SGLang's is), so a sample without spans is as old as its submission.
        """
        submitted = self.submit_version
        spans = [submitted if span.version is None else span.version for span in self.version_spans]
        labels = [int(label) if str(label).isdigit() else submitted for label in self.weight_versions]
        versions = spans or [*labels, *([] if submitted is None else [submitted])]
        known = [version for version in versions if version is not None]
        return min(known) if known and len(known) == len(versions) else None

    @property
    def newest_version(self) -> int | None:
        """The newest version that a span names, else the submit version."""
        return max((s.version for s in self.version_spans if s.version is not None), default=self.submit_version)

    def sampled_spans(self) -> Iterator[VersionSpan]:
        """Spans that cover the whole response in order, each with the oldest version that its tokens can be from.

        Where no span tells, that is `oldest_version`; None: nobody knows.
        """
        at, oldest = 0, self.oldest_version
        for span in self.version_spans:
            if span.start > at:
                yield VersionSpan(oldest, at, span.start)
            yield span if span.version is not None else span._replace(version=self.submit_version)
            at = span.end
        if at < self.response_length:
            yield VersionSpan(oldest, at, self.response_length)

    def trainable_tokens(self) -> Counter[int | None]:
        """Trainable tokens by the oldest version that they can be from; None: nobody knows."""
        tokens: Counter[int | None] = Counter()
        if not self.remove_sample:
            for version, start, end in self.sampled_spans():
                tokens[version] += end - start if self.loss_mask is None else sum(self.loss_mask[start:end])
        return +tokens

    def append_response(
        self, ids: Sequence[int], log_probs: Sequence[float], spans: Sequence[VersionSpan], *, trainable: bool = True
    ) -> None:
        """Adds sampled tokens (or, not ``trainable``, a tool's: no spans, mask 0, log-prob 0) to the response.

        ``spans`` are relative to ``ids``. Raises ValueError where ids and log-probs differ in number.
        """
        if len(ids) != len(log_probs):
            raise ValueError(f"{len(ids)} token ids but {len(log_probs)} log-probs")
        start = self.response_length
        if self.loss_mask is None:
            self.loss_mask = [1] * start
        if self.rollout_log_probs is None:
            self.rollout_log_probs = [0.0] * start
        self.tokens = [*self.tokens, *ids]
        self.rollout_log_probs = [*self.rollout_log_probs, *log_probs]
        self.loss_mask = [*self.loss_mask, *([1 if trainable else 0] * len(ids))]
        self.response_length += len(ids)
        for span in spans:
            self._append_span(VersionSpan(span.version, span.start + start, span.end + start))

    def _append_span(self, span: VersionSpan) -> None:
        last = self.version_spans[-1] if self.version_spans else None
        if last is not None and last.version == span.version and last.end == span.start:
            self.version_spans[-1] = VersionSpan(last.version, last.start, span.end)
            return
        self.version_spans.append(span)
        self.weight_versions.append("default" if span.version is None else str(span.version))

    # ---- the contract's methods

    def get_reward_value(self, args: Any) -> float | None:
        """The number in the reward, by ``args.reward_key`` where it is an object. Raises as `reward_value`."""
        return self.reward_value(getattr(args, "reward_key", None))

    def reward_value(self, key: str | None) -> float | None:
        """The number that ``reward`` is, or holds under ``key``; None: unscored. Raises RewardFailed where it holds none."""
        value: Any = self.reward
        if isinstance(value, dict):
            if key not in value:
                flag = "no --reward-key is set" if key is None else f"--reward-key {key} is not there"
                keys = ", ".join(map(str, value))
                raise RewardFailed(f"the reward of sample {self.index} is an object and {flag}; its keys: {keys}")
            value = value[key]
        if value is None:
            return None
        if not hasattr(value, "__float__"):
            raise RewardFailed(f"the reward of sample {self.index} is {value!r}, which is no number")
        return float(value)

    def update_from_meta_info(self, args: Any, meta_info: dict[str, Any]) -> None:
        """Takes counters, the version label and the status from an engine reply's ``meta_info``."""
        self.spec_info.add(meta_info)
        self.prefix_cache_info.add(meta_info)
        if meta_info.get("weight_version") is not None:
            self.weight_versions.append(str(meta_info["weight_version"]))
        reason = (meta_info.get("finish_reason") or {}).get("type")
        self.status = FINISH_STATUS.get(str(reason), self.status)

    def validate(self) -> None:
        """Raises ValueError where arrays per response token differ in length."""
        if not 0 <= self.response_length <= len(self.tokens):
            raise ValueError(f"response_length {self.response_length} but {len(self.tokens)} tokens")
        for name in ("loss_mask", "rollout_log_probs", "teacher_log_probs", "opd_reverse_kl"):
            values = getattr(self, name)
            if values is not None and len(values) != self.response_length:
                raise ValueError(f"{name} has {len(values)} entries for {self.response_length} response tokens")

    def strip_last_output_tokens(self, n: int, tokenizer: Any) -> None:
        """Removes the last ``n`` response tokens and everything that belongs to them."""
        n = min(n, self.response_length)
        if n <= 0:
            return
        self.tokens = self.tokens[:-n]
        self.response_length -= n
        for name in ("loss_mask", "rollout_log_probs", "teacher_log_probs", "opd_reverse_kl"):
            values = getattr(self, name)
            if values is not None:
                setattr(self, name, values[:-n])
        kept = [s for s in self.version_spans if s.start < self.response_length]
        if self.version_spans:
            self.weight_versions = self.weight_versions[: len(kept)]
        self.version_spans = [s._replace(end=min(s.end, self.response_length)) for s in kept]
        self.response = tokenizer.decode(self.tokens[len(self.tokens) - self.response_length :])

    def reset_for_retry(self) -> None:
        """Clears everything that was generated; keeps identity, prompt, label, metadata and routing key."""
        if self.response_length:
            self.tokens = self.tokens[: -self.response_length]
        fresh = Sample()
        for name in _GENERATED:
            setattr(self, name, getattr(fresh, name))
        self.status = Status.ABORTED

    def to_dict(self) -> dict[str, Any]:
        values = dict(self.__dict__)
        values["status"] = self.status.value
        values["spec_info"] = self.spec_info.to_dict()
        values["prefix_cache_info"] = self.prefix_cache_info.to_dict()
        values["version_spans"] = [tuple(s) for s in self.version_spans]
        for name in ("reward_spec", "adapter"):
            if values[name] is not None:
                values[name] = dict(values[name].__dict__)
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Sample:
        values = dict(values)
        values["status"] = Status(values.get("status", "pending"))
        values["spec_info"] = SpecInfo.from_dict(values.get("spec_info") or {})
        values["prefix_cache_info"] = PrefixCacheInfo.from_dict(values.get("prefix_cache_info") or {})
        values["version_spans"] = [VersionSpan(*s) for s in values.get("version_spans", [])]
        if values.get("reward_spec") is not None:
            values["reward_spec"] = RewardSpec(**values["reward_spec"])
        if values.get("adapter") is not None:
            values["adapter"] = AdapterRef(**values["adapter"])
        sample = cls()
        for name, value in values.items():
            setattr(sample, name, value)
        return sample


_GENERATED = (
    "response", "response_length", "reward", "loss_mask", "weight_versions", "rollout_log_probs",
    "rollout_routed_experts", "rollout_indexer_topk", "remove_sample", "teacher_log_probs", "opd_reverse_kl",
    "multimodal_train_inputs", "train_metadata", "non_generation_time", "spec_info", "prefix_cache_info",
    "version_spans", "submit_version",
)  # fmt: skip


def iter_samples(group: Group) -> Iterator[Sample]:
    """Every sample of a group, compact siblings included."""
    for item in group:
        if isinstance(item, list):
            yield from item
        else:
            yield item


def first_sample(group: Group) -> Sample:
    return next(iter_samples(group))


@dataclass(frozen=True)
class FinishedGroup:
    """A scored group that waits to be trained. ``oldest_version`` None: never fresh.

    ``newest_trainable``: the newest version that a trainable token is from; None: it has none, or nobody knows.
    """

    issue_id: int
    samples: Group
    oldest_version: int | None
    newest_version: int | None
    newest_trainable: int | None = None


@dataclass(frozen=True)
class Batch:
    """What one training step takes: ``groups`` in issue order, trained at weight ``version``.

    ``metrics`` are those that hooks report beside it.
    """

    step: int
    version: int
    groups: tuple[FinishedGroup, ...]
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Weights:
    """Published weights that stay readable: where ``version`` lies and how to read it.

    ``kind`` is "shm" (``path`` is a flat segment with its manifest beside it), "disk" (a safetensors folder)
    or "broadcast" (``path`` is the address of the trainer's `miles.train.sender`).
    """

    version: int
    kind: str
    path: str
