"""A prompt in, what an agent made of it over a session server out: the agent is the user's function, or calls one.

The function is ``async run(base_url, prompt, request_kwargs, metadata) -> dict | None``. It chats, in OpenAI's protocol,
at ``base_url + "/v1"``, and what it returns joins the samples' metadata, where a reward function finds it.
"""

from __future__ import annotations

import argparse
import random
from copy import deepcopy
from typing import Any

from miles.config import Problems, Settings
from miles.errors import HookError, MilesError
from miles.hooks import hook_failed, load_function
from miles.rollout.base_types import GenerateFnInput, GenerateFnOutput
from miles.rollout.generate_hub.session_client import session_at
from miles.types import Sample

AGENT, IP, PORT = "--custom-agent-function-path", "--session-server-ip", "--session-server-port"
RENAMED = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "sampling_seed": "seed"}
CHAT_FIELDS = frozenset(
    [
        "frequency_penalty",
        "ignore_eos",
        "logit_bias",
        "max_tokens",
        "min_p",
        "min_tokens",
        "no_stop_trim",
        "presence_penalty",
        "repetition_penalty",
        "seed",
        "skip_special_tokens",
        "stop",
        "stop_regex",
        "stop_token_ids",
        "temperature",
        "top_k",
        "top_p",
    ]
)
"""Sampling fields of a chat completion request, as SGLang's server takes them."""


async def generate(input: GenerateFnInput) -> GenerateFnOutput:
    """Runs the agent in a session of its own and returns what was recorded: a sample, or several compact siblings.

    An agent that recorded nothing leaves an aborted sample. Raises HookError where the agent fails.
    """
    args, issued = input.args, input.sample
    server = f"{args.session_server_ip}:{random.choice(args.session_server_port)}"
    async with session_at(server) as session:
        told = issued.metadata | {
            "max_seq_len": args.max_seq_len,
            "session_server_id": server,
            "session_server_instance_id": session.instance_id,
        }
        metadata = await _run_agent(input, session.url, told)
        samples = await session.samples(issued, args.max_seq_len, metadata)
    if not samples:
        nothing = deepcopy(issued)
        nothing.status = Sample.Status.ABORTED
        return GenerateFnOutput(nothing)
    tool_s = (metadata.get("agent_metrics") or {}).get("total_tool_time") or 0.0
    for sample in samples:
        sample.metadata |= metadata
        sample.non_generation_time += tool_s
        if len(samples) > 1 and sample.rollout_id is None:
            sample.rollout_id = issued.index
    return GenerateFnOutput(samples[0] if len(samples) == 1 else samples)


async def _run_agent(input: GenerateFnInput, url: str, metadata: dict[str, Any]) -> dict[str, Any]:
    path = input.args.custom_agent_function_path
    function = load_function(path)
    sample = input.sample
    try:
        returned = await function(url, sample.prompt, request_kwargs(input.sampling_params), metadata)
    except MilesError:
        raise
    except Exception as error:  # the boundary to user code: whatever it raises is the hook's failure
        raise hook_failed(path, function, error, f"sample {sample.index}") from error
    if returned is not None and not isinstance(returned, dict):
        raise HookError(f"{path} returned {returned!r:.100} for sample {sample.index}; a dict or None works")
    return returned or {}


def request_kwargs(sampling_params: dict[str, Any]) -> dict[str, Any]:
    """Sampling parameters under the names of a chat completion request; what it has no field for is left out."""
    named = {RENAMED.get(name, name): value for name, value in sampling_params.items()}
    return {name: value for name, value in named.items() if name in CHAT_FIELDS and value is not None}


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(AGENT, default=None)
    parser.add_argument("--max-seq-len", type=int, default=None)
    parser.add_argument(IP, default=None)
    parser.add_argument(PORT, type=int, nargs="+", default=None)


def _check(settings: Settings, problems: Problems) -> None:
    given = settings.attributes
    path = given.get("custom_agent_function_path")
    try:
        if not load_function(path):
            problems.add(AGENT, path, "nothing runs the agent", "the module.name of its function works")
    except HookError as error:
        problems.add(AGENT, path, str(error), "give a path that can be imported here")
    for flag in (IP, PORT):
        if not given.get(flag[2:].replace("-", "_")):
            problems.add(flag, None, "the agent needs a session server that runs", "its address works")


generate.add_arguments = _add_arguments  # type: ignore[attr-defined]
generate.check = _check  # type: ignore[attr-defined]
