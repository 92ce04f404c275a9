"""A prompt and tools in, a conversation with tool calls out, token for token as it was sampled.

    sample a turn ──▶ calls in it? ──▶ run them ──▶ append their results, rendered, with mask 0 ──▶ next turn

The ids of a turn are kept verbatim, and nothing is rendered twice: only what the chat template writes after a turn is
encoded, the end of the turn included where the model did not sample it.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
from typing import Any
from weakref import WeakKeyDictionary

from miles.config import Problems, Settings
from miles.data.render import PromptEncoder
from miles.errors import HookError, MilesError
from miles.hooks import hook_failed, load_function
from miles.rollout.base_types import GenerateFnInput, GenerateFnOutput
from miles.rollout.generate_hub.single_turn import sample_response, tokens_left
from miles.rollout.generate_hub.tool_calls import PARSERS, BadCall, ToolCall
from miles.types import Sample

PATH = "miles.rollout.generate_hub.multi_turn.generate"
TOOLS, PARSER = "--generate-tool-specs-path", "--generate-tool-call-parser"
EXECUTE = "--generate-execute-tool-function-path"

_encoders: WeakKeyDictionary[Any, PromptEncoder] = WeakKeyDictionary()


async def generate(input: GenerateFnInput) -> GenerateFnOutput:
    """Samples turns until one has no tool call, ends otherwise than by a stop, or is the last one.

    The response's limits hold for all turns and results together. A result that leaves no room for another token isn't
    appended: the sample is truncated. A sample with tokens goes on from them.
    """
    sample, args = input.sample, input.args
    if not sample.tokens:
        sample.tokens = list(input.state.encode(sample.prompt, _tools(args, sample)))
    sample.append_response([], [], [])
    parse = PARSERS[args.generate_tool_call_parser]
    for turn in range(_turns(sample), args.generate_max_turns):
        start = _turn_start(sample)
        await sample_response(input)
        if sample.status is not Sample.Status.COMPLETED or turn + 1 == args.generate_max_turns:
            break
        calls = parse(_text(input, sample.tokens[len(sample.tokens) - sample.response_length + start :]))
        if not calls or not await _append_results(input, calls):
            break
    return GenerateFnOutput(sample)


async def _append_results(input: GenerateFnInput, calls: list[ToolCall | BadCall]) -> bool:
    """Runs the calls of a turn and appends what they gave. False: there is no room, the sample is truncated."""
    sample, now = input.sample, asyncio.get_running_loop().time
    started = now()
    results = [call.why if isinstance(call, BadCall) else await _execute(input, call) for call in calls]
    sample.non_generation_time += now() - started
    messages = [
        {"role": "tool", "content": result, "tool_call_id": f"call{at:05d}"}
        | ({"name": call.name} if isinstance(call, ToolCall) else {})
        for at, (call, result) in enumerate(zip(calls, results, strict=True))
    ]
    ids = _encoder(input).encode_after_turn(messages, sample.tokens[-1:], _tools(input.args, sample))
    room = tokens_left(sample, input.sampling_params.get("max_new_tokens"), input.max_context_len)
    if room is not None and len(ids) >= room:
        sample.status = Sample.Status.TRUNCATED
        return False
    sample.append_response(ids, [0.0] * len(ids), [], trainable=False)
    sample.response += input.state.tokenizer.decode(ids)
    return True


async def _execute(input: GenerateFnInput, call: ToolCall) -> str:
    path = input.args.generate_execute_tool_function_path
    function = load_function(path)
    try:
        result = function(call.name, call.arguments)
        result = await result if inspect.isawaitable(result) else result
    except MilesError:
        raise
    except Exception as error:  # the boundary to user code: whatever it raises is the hook's failure
        on = f"sample {input.sample.index}, tool {call.name}"
        raise hook_failed(path, function, error, on) from error
    if not isinstance(result, str):
        raise HookError(f"{path} returned {result!r:.100} for tool {call.name}; a str works")
    return result


def _tools(args: argparse.Namespace, sample: Sample) -> Any:
    """The run's tools, else the row's own."""
    return load_function(args.generate_tool_specs_path) or sample.metadata.get("tools")


def _turns(sample: Sample) -> int:
    """Turns that were answered: what tools said is masked, so each stretch of zeros ends one."""
    mask = sample.loss_mask or []
    return sum(not here and before for here, before in zip(mask, [0, *mask], strict=False))


def _turn_start(sample: Sample) -> int:
    """Where in the response the turn begins that is being sampled."""
    mask = sample.loss_mask or []
    return next((at for at in range(len(mask), 0, -1) if not mask[at - 1]), 0)


def _text(input: GenerateFnInput, ids: list[int]) -> str:
    return str(input.state.tokenizer.decode(ids, skip_special_tokens=False))


def _encoder(input: GenerateFnInput) -> PromptEncoder:
    tokenizer = input.state.tokenizer
    if tokenizer not in _encoders:
        _encoders[tokenizer] = PromptEncoder(tokenizer, True, input.args.apply_chat_template_kwargs)
    return _encoders[tokenizer]


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--generate-max-turns", type=int, default=16)
    parser.add_argument(TOOLS, default=None)
    parser.add_argument(PARSER, default=None)
    parser.add_argument(EXECUTE, default=None)


def _check(settings: Settings, problems: Problems) -> None:
    given = settings.attributes
    if not settings.data.apply_chat_template:
        problems.add(
            "--custom-generate-function-path", PATH, "tool results are rendered by the chat template",
            "with --apply-chat-template it works",
        )  # fmt: skip
    parser = given.get("generate_tool_call_parser")
    if parser not in PARSERS:
        problems.add(PARSER, parser, "is no parser that there is", f"one of {', '.join(PARSERS)} works")
    if given.get("generate_max_turns", 1) < 1:
        problems.add("--generate-max-turns", given["generate_max_turns"], "samples nothing", "1 or more works")
    for flag in (TOOLS, EXECUTE):
        path = given.get(flag[2:].replace("-", "_"))
        try:
            if not load_function(path) and flag == EXECUTE:
                problems.add(flag, path, "nothing runs the tools", "the module.name of f(name, arguments) -> str works")
        except HookError as error:
            problems.add(flag, path, str(error), "give a path that can be imported here")


generate.add_arguments = _add_arguments  # type: ignore[attr-defined]
generate.check = _check  # type: ignore[attr-defined]
