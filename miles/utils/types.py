"""Door: the nouns that hooks are written against."""

from typing import Any

from miles.types import AdapterRef, PrefixCacheInfo, RewardSpec, Sample, SpecInfo, VersionSpan

RolloutBatch = dict[str, list[Any]]

__all__ = ["AdapterRef", "PrefixCacheInfo", "RewardSpec", "RolloutBatch", "Sample", "SpecInfo", "VersionSpan"]
