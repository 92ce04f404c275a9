"""What an engine does now in, Prometheus text under SGLang's names out."""

from __future__ import annotations

import time

from miles.engine.local.engine import Engine
from miles.engine.local.sequence import Sequence

Sample = tuple[str, str, str, float]
"""Name, kind, help and value."""


class Counters:
    """What ended so far, in tokens. Belongs to one event loop."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generated_tokens = 0
        self._scraped = (time.monotonic(), 0)

    def count(self, sequence: Sequence) -> None:
        """A request has ended."""
        self.prompt_tokens += len(sequence.prompt_ids)
        self.cached_tokens += sequence.cached_tokens
        self.generated_tokens += len(sequence.output_ids)

    def throughput(self, generated: int) -> float:
        """Tokens per second since the call before this one; ``generated``: all so far, those of running requests included."""
        now, (then, before) = time.monotonic(), self._scraped
        self._scraped = (now, generated)
        return max(generated - before, 0) / max(now - then, 1e-9)


def prometheus(engine: Engine, counters: Counters, model: str, kv_tokens: int) -> str:
    """The text of a scrape. Runs between two steps; ``kv_tokens``: most that the cache holds."""
    running, waiting = engine.requests()
    held = sum(s.length for s in running)
    generated = counters.generated_tokens + sum(len(s.output_ids) for s in (*running, *waiting))
    samples: list[Sample] = [
        ("num_running_reqs", "gauge", "requests that hold keys and values", engine.running),
        ("num_queue_reqs", "gauge", "requests that wait", engine.waiting),
        ("num_used_tokens", "gauge", "tokens whose keys and values are held", held),
        ("token_usage", "gauge", "share of the cache that is held", held / kv_tokens),
        ("gen_throughput", "gauge", "tokens per second since the last scrape", counters.throughput(generated)),
        (
            "cache_hit_rate",
            "gauge",
            "share of prompt tokens that needed no prefill",
            counters.cached_tokens / max(counters.prompt_tokens, 1),
        ),
        ("prompt_tokens_total", "counter", "prompt tokens of requests that ended", counters.prompt_tokens),
        ("generation_tokens_total", "counter", "tokens sampled", generated),
    ]
    label = model.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    lines: list[str] = []
    for name, kind, text, value in samples:
        lines += [f"# HELP sglang:{name} {text}", f"# TYPE sglang:{name} {kind}"]
        lines.append(f'sglang:{name}{{model_name="{label}"}} {value}')
    return "\n".join(lines) + "\n"
