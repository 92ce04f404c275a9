"""A generate function of today: two requests with a tool's token between them."""

from dataclasses import replace

from miles.rollout.base_types import GenerateFnInput, GenerateFnOutput
from miles.rollout.generate_hub import single_turn

FIRST_TURN = 2


async def generate(input: GenerateFnInput) -> GenerateFnOutput:
    params = input.sampling_params
    first = replace(input, sampling_params=params | {"max_new_tokens": FIRST_TURN, "ignore_eos": True})
    sample = (await single_turn.generate(first)).samples
    if sample.response_length < FIRST_TURN:
        return GenerateFnOutput(sample)
    tool = input.state.tokenizer.encode("=", add_special_tokens=False)
    sample.append_response(tool, [0.0] * len(tool), [], trainable=False)
    sample.response += "="
    return await single_turn.generate(input)
