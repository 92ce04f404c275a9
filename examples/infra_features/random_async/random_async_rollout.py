"""One step in, a batch of random prompts with random lengths and rewards out: load on all parts of a run, without data.

Nothing is learned. Prompts are random tokens, a response gets as many tokens as a coin says, and so does its reward.
"""

import asyncio
import random

from miles.utils.async_utils import run
from miles.utils.http_utils import post

PROMPT_TOKENS = (4, 12)
RESPONSE_TOKENS = (1, 8)


def generate_rollout_random_async(args, rollout_id, data_source, evaluation=False):
    """The groups of step ``rollout_id``, all generated at once. The data source gives empty samples: they are filled here."""
    if evaluation:
        raise ValueError("random prompts have nothing to be evaluated on")
    groups = data_source.get_samples(args.rollout_batch_size)
    run(_fill_all(args, [sample for group in groups for sample in group]))
    return groups


async def _fill_all(args, samples):
    async with asyncio.TaskGroup() as tasks:
        for sample in samples:
            tasks.create_task(_fill(args, sample))


async def _fill(args, sample):
    """The same group has the same prompt; everything follows from the seed and the sample's numbers."""
    shared = random.Random(f"{args.rollout_seed} {sample.group_index}")
    own = random.Random(f"{args.rollout_seed} {sample.group_index} {sample.index}")
    prompt = [shared.randrange(3, 13) for _ in range(shared.randint(*PROMPT_TOKENS))]
    payload = {
        "input_ids": prompt,
        "sampling_params": {"temperature": 1.0, "max_new_tokens": own.randint(*RESPONSE_TOKENS), "ignore_eos": True},
        "return_logprob": True,
    }
    reply = await post(f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate", payload)
    sampled = reply["meta_info"]["output_token_logprobs"]
    sample.tokens = prompt + [token for _, token, *_ in sampled]
    sample.response = reply["text"]
    sample.response_length = len(sampled)
    sample.rollout_log_probs = [log_prob for log_prob, *_ in sampled]
    sample.update_from_meta_info(args, reply["meta_info"])
    sample.reward = float(own.random() < 0.5)
