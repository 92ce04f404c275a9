"""Command line in, a serving engine out: `python -m miles.engine.local --model-path DIR`.

When it serves it writes one line to stdout, `miles-engine ready http://HOST:PORT`; logs go to stderr. It ends by itself
when the process that started it ends.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path

from miles.errors import MilesError


def main() -> None:
    parent_fd = _watch_parent()
    options = _parser().parse_args()
    logging.basicConfig(
        stream=sys.stderr, level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    from miles.engine.local.server import EngineOptions, serve

    try:
        serve(EngineOptions(**vars(options)), parent_fd)
    except MilesError as error:
        sys.exit(str(error))


def _watch_parent() -> int | None:
    """A descriptor that becomes readable when the parent process ends (Linux), taken before anything slow."""
    try:
        return os.pidfd_open(os.getppid())
    except (AttributeError, OSError):
        return None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m miles.engine.local", description="miles' embedded inference engine"
    )
    add = parser.add_argument
    add("--model-path", type=Path, required=True, help="model folder: config.json, safetensors, tokenizer.json")
    add("--host", default="127.0.0.1", help="address to bind (%(default)s)")
    add("--port", type=int, default=0, help="port to bind; 0: a free one, see the ready line")
    add(
        "--dtype",
        default="auto",
        choices=("auto", "float32", "bfloat16"),
        help="auto: as the checkpoint, if the CPU can",
    )
    add("--threads", type=_positive, default=1, help="torch threads (%(default)s)")
    add("--max-running-requests", type=_positive, default=256, help="most requests at a time (%(default)s)")
    add(
        "--max-total-tokens",
        type=_positive,
        default=None,
        help="size of the KV cache in tokens (from the context length)",
    )
    add("--context-length", type=_positive, default=None, help="most tokens of prompt plus response (the model's)")
    add("--prefill-tokens", type=_positive, default=1024, help="most prompt tokens that join in a step (%(default)s)")
    add("--weight-version", default="default", help="label of the weights in --model-path (%(default)s)")
    add("--seed", type=int, default=0, help="seed of requests that bring none (%(default)s)")
    add(
        "--api-key",
        default=os.environ.get("MILES_ENGINE_API_KEY"),
        help="key that requests must bring (MILES_ENGINE_API_KEY); needed where --host is not this machine alone",
    )
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


if __name__ == "__main__":
    main()
