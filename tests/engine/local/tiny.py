"""Tiny random models in Hugging Face folders, engines over them, and what transformers says of the same tokens."""

import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast, Qwen3Config

from miles.engine.local.engine import Engine
from miles.engine.local.kv_cache import KVCache
from miles.engine.local.model import Model
from miles.engine.local.model_config import ModelConfig
from miles.engine.local.sampling_params import SamplingParams
from miles.engine.local.scheduler import Scheduler
from miles.engine.local.sequence import Sequence
from miles.engine.local.text import Text
from miles.engine.local.weights import load_folder

VOCAB = 37
EOS = 1
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "eos_token_id": EOS,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 50000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
CONFIGS = {
    "llama": LlamaConfig(**SHAPE, rope_parameters=LLAMA3_ROPE, attention_bias=True, mlp_bias=True),
    "qwen3": Qwen3Config(**SHAPE, tie_word_embeddings=True),
}


def save_model(folder: Path, family: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    """Writes a random model with biases, norms and all, and a word-level tokenizer: id i is the word "wi"."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[family], dtype=torch.float32)
    for name, weight in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            torch.nn.init.uniform_(weight, 0.5, 1.5)
    model.to(dtype).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=f"w{EOS}").save_pretrained(folder)
    return folder


def load_model(folder: Path) -> Model:
    config = ModelConfig.read(folder)
    return Model(config, load_folder(folder, config, torch.float32))


def make_scheduler(
    folder: Path,
    *,
    tokens: int = 8192,
    rows: int = 16,
    prefill_tokens: int = 512,
    prefix_tokens: int = 1024,
    **mode: bool,
) -> Scheduler:
    cache = KVCache(ModelConfig.read(folder), torch.float32, tokens, rows)
    return Scheduler(cache, prefill_tokens, prefix_tokens, **mode)


def make_engine(folder: Path, **sizes) -> Engine:
    return Engine(load_model(folder), make_scheduler(folder, **sizes), Text(folder).decode)


def request(prompt_ids: list[int], new: int, seed: int = 0, **params) -> Sequence:
    """A sequence that ignores eos unless told otherwise."""
    sampling = SamplingParams(max_new_tokens=new, ignore_eos=True, **params)
    return Sequence(f"r{seed}", prompt_ids, sampling, new, sorted(sampling.stop_token_ids), seed)


def random_prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(length)]


def drain(engine: Engine) -> list[Sequence]:
    """Steps until nothing may run; what ended on the way."""
    while engine.may_step:
        engine.step()
    return engine.take_ended()


def steps(engine: Engine, count: int) -> None:
    for _ in range(count):
        engine.step()


def spans(sequence: Sequence) -> list[tuple[str, int, int]]:
    return [(s["version"], s["start"], s["end"]) for s in sequence.version_spans()]


class Reference:
    """A full forward by transformers in float32."""

    def __init__(self, folder: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")

    @torch.inference_mode()
    def log_probs(self, ids: list[int], temperature: float = 1.0) -> torch.Tensor:
        """Log-probs (len(ids), vocab) of what follows each token."""
        return (self._model(torch.tensor([ids])).logits[0].double() / temperature).log_softmax(-1)

    def of_response(self, sequence: Sequence) -> torch.Tensor:
        """Log-prob of each response token."""
        temperature = 1.0 if sequence.params.greedy else sequence.params.temperature
        table = self.log_probs(sequence.prompt_ids + sequence.output_ids, temperature)
        ids = torch.tensor(sequence.output_ids)
        return table[len(sequence.prompt_ids) - 1 : -1].gather(1, ids[:, None])[:, 0]

    def greedy(self, prompt_ids: list[int], count: int) -> list[int]:
        ids = list(prompt_ids)
        for _ in range(count):
            ids.append(int(self.log_probs(ids)[-1].argmax()))
        return ids[len(prompt_ids) :]


def worst_difference(reference: Reference, sequences: list[Sequence]) -> float:
    return max(float((reference.of_response(s) - torch.tensor(s.log_probs).double()).abs().max()) for s in sequences)
