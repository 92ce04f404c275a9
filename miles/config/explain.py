"""Settings in, a text out: every setting with its value and where it comes from, then what is derived from them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from miles.config import flags
from miles.config.settings import Settings

DERIVED = {
    "mode": "program and selectors",
    "staleness_bound": "mode, --max-weight-staleness",
    "batch_samples": "--rollout-batch-size x --n-samples-per-prompt",
    "optimizer_steps": "batch_samples, --num-steps-per-rollout or --global-batch-size",
    "samples_per_optimizer_step": "batch_samples // optimizer_steps",
    "slots": "--async-max-concurrent-samples, else batch_samples",
    "buffer_groups": "--async-data-buffer-capacity-factor x --rollout-batch-size",
    "retry_unused": "--async-unused-samples-handler, --rollout-function-path",
    "num_engines": "--rollout-num-gpus // --rollout-num-gpus-per-engine",
    "trainer_ranks": "--actor-num-nodes x --actor-num-gpus-per-node",
}
"""Sizes that no flag stores, and what they come from."""


def explain(settings: Settings) -> str:
    """Three columns below the title of each owner: the flag, its value, its source."""
    sections = []
    for part in settings.parts():
        rows = [
            (flags.flag_name(f), flags.shown(f, vars(part)[f.name]), settings.sources.get(f.name, "default"))
            for f in flags.flag_fields(type(part))
        ]
        sections.append(_section(type(part).__doc__, rows))
    sources = settings.sources
    if settings.passthrough:
        passed = [(name, value, sources.get(name, flags.FLAG)) for name, value in settings.passthrough.items()]
        sections.append(_section("For the servers", passed))
    if settings.attributes:
        more = [(name, value, sources.get(name, "hooks")) for name, value in settings.attributes.items()]
        sections.append(_section("For hooks besides", more))
    sections.append(_section("Derived", [(name, getattr(settings, name), of) for name, of in DERIVED.items()]))
    return "\n".join(sections)


def _section(title: str | None, rows: Iterable[tuple[str, Any, str]]) -> str:
    lines = [f"  {name:<42} {_shown(value):<30} {source}".rstrip() for name, value, source in rows]
    return "\n".join([title or "", *lines]) + "\n"


def _shown(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "unset", True: "on", False: "off"}[value]
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
