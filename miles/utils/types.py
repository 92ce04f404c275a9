"""Door: the nouns that hooks are written against."""

from miles.types import AdapterRef, PrefixCacheInfo, RewardSpec, Sample, SpecInfo, VersionSpan

__all__ = ["AdapterRef", "PrefixCacheInfo", "RewardSpec", "Sample", "SpecInfo", "VersionSpan"]
