"""A first-era generate function: it renders the prompt itself and asks the router."""

from functools import lru_cache

from miles.utils.http_utils import post
from miles.utils.types import Sample


@lru_cache
def tokenizer_of(path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path)


async def generate(args, sample, sampling_params, evaluation=False):
    tokenizer = tokenizer_of(args.hf_checkpoint)
    text = sample.prompt if isinstance(sample.prompt, str) else sample.prompt[-1]["content"] + "="
    prompt_ids = tokenizer.encode(text, add_special_tokens=False)
    payload = {"input_ids": prompt_ids, "sampling_params": sampling_params, "return_logprob": True}
    output = await post(f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate", payload)

    meta = output["meta_info"]
    new_tokens = [item[1] for item in meta["output_token_logprobs"]]
    sample.tokens = prompt_ids + new_tokens
    sample.response = output["text"]
    sample.response_length = len(new_tokens)
    sample.loss_mask = [1] * len(new_tokens)
    sample.rollout_log_probs = [item[0] for item in meta["output_token_logprobs"]]
    if "weight_version" in meta:
        sample.weight_versions.append(meta["weight_version"])
    match meta["finish_reason"]["type"]:
        case "length":
            sample.status = Sample.Status.TRUNCATED
        case "abort":
            sample.status = Sample.Status.ABORTED
        case "stop":
            sample.status = Sample.Status.COMPLETED
    return sample
