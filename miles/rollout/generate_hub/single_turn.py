"""One prompt in, one response out; a sample that already has tokens goes on from them."""

from __future__ import annotations

from miles.rollout.base_types import GenerateFnInput, GenerateFnOutput
from miles.types import FINISH_STATUS, Sample


async def generate(input: GenerateFnInput) -> GenerateFnOutput:
    """Samples the response of ``input.sample``. What is left of its response length, and of the context, bounds it."""
    sample = input.sample
    if not sample.tokens:
        sample.tokens = list(input.state.encode(sample.prompt, sample.metadata.get("tools")))
    await sample_response(input)
    return GenerateFnOutput(sample)


async def sample_response(input: GenerateFnInput) -> None:
    """One request: what is sampled after the sample's tokens is appended, its status says how it ended.

    Without room for a token there is no request, and the sample is truncated.
    """
    sample, state = input.sample, input.state
    room = tokens_left(sample, input.sampling_params.get("max_new_tokens"), input.max_context_len)
    if room is not None and room <= 0:
        sample.append_response([], [], [])
        sample.status = Sample.Status.TRUNCATED
        return
    params = dict(input.sampling_params)
    if room is not None:
        params["max_new_tokens"] = room
    generation = await state.client.generate(
        sample.tokens,
        params,
        request_id=state.request_id(sample),
        submit_version=state.version,
        routing_key=sample.routing_key,
    )
    sample.append_response(generation.ids, generation.log_probs, generation.spans)
    sample.response += generation.text
    sample.prefix_cache_info.add(generation.meta_info)
    sample.spec_info.add(generation.meta_info)
    sample.status = FINISH_STATUS.get(generation.finish, Sample.Status.COMPLETED)
    if sample.status is Sample.Status.ABORTED and room is not None and len(generation.ids) >= room:
        sample.status = Sample.Status.TRUNCATED


def tokens_left(sample: Sample, max_new_tokens: int | None, max_context: int | None) -> int | None:
    """How many tokens the response may still get; None: no bound but the engine's own."""
    bounds = []
    if max_new_tokens is not None:
        bounds.append(max_new_tokens - sample.response_length)
    if max_context is not None:
        bounds.append(max_context - len(sample.tokens))
    return min(bounds, default=None)
