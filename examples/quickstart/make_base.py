"""Seeds in, everything the quickstart needs out: a digit tokenizer, a 0.1 M base model, training and held-out prompts.

The base model is trained, supervised, on `482913=` followed by six digits: in 75 % of the cases a copy, in 25 % the
reversal. It therefore knows both and prefers the copy; reinforcement learning only has to change its mind.

    python examples/quickstart/make_base.py
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

HERE = Path(__file__).parent
DIGITS = 6
TRAIN_PROMPTS, EVAL_PROMPTS = 4096, 256
STEPS, BATCH, LEARNING_RATE, REVERSED_SHARE = 400, 256, 3e-3, 0.25


def make_prompts(seed: int = 0) -> tuple[list[str], list[str]]:
    """Distinct random numbers of six digits: those to train on and those held out."""
    numbers = [f"{n:0{DIGITS}d}" for n in random.Random(seed).sample(range(10**DIGITS), TRAIN_PROMPTS + EVAL_PROMPTS)]
    return numbers[:TRAIN_PROMPTS], numbers[TRAIN_PROMPTS:]


def write_prompts(path: Path, numbers: list[str]) -> None:
    rows = [{"prompt": f"{n}=", "label": n[::-1]} for n in numbers]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character: ten digits and the equals sign."""
    words = ["<pad>", "<eos>", "<unk>", "=", *"0123456789"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", model_max_length=64
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=64,
        rope_theta=10000.0,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        dtype="float32",
    )
    return Qwen3ForCausalLM(config)


def train(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """Supervised steps on fresh random numbers; the loss counts what follows the equals sign."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=STEPS)
    first_digit = tokenizer.convert_tokens_to_ids("0")
    equals = torch.full((BATCH, 1), tokenizer.convert_tokens_to_ids("="))
    end = torch.full((BATCH, 1), tokenizer.eos_token_id)
    for _ in range(STEPS):
        digits_BD = torch.randint(10, (BATCH, DIGITS)) + first_digit
        answers_BD = torch.where(torch.rand(BATCH, 1) < REVERSED_SHARE, digits_BD.flip(1), digits_BD)
        ids_BT = torch.cat([digits_BD, equals, answers_BD, end], dim=1)
        labels_BT = ids_BT.clone()
        labels_BT[:, : DIGITS + 1] = -100
        model(input_ids=ids_BT, labels=labels_BT).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


@torch.no_grad()
def reversal_accuracy(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, numbers: list[str], *, greedy: bool
) -> float:
    """The share of numbers that the model reverses and then ends."""
    ids_BT = tokenizer([f"{n}=" for n in numbers], return_tensors="pt")["input_ids"]
    for _ in range(DIGITS + 1):
        logits_BV = model(input_ids=ids_BT).logits[:, -1]
        next_B1 = logits_BV.argmax(-1, keepdim=True) if greedy else torch.multinomial(logits_BV.softmax(-1), 1)
        ids_BT = torch.cat([ids_BT, next_B1], dim=1)
    replies = tokenizer.batch_decode(ids_BT[:, DIGITS + 1 :])
    return sum(reply == n[::-1] + "<eos>" for reply, n in zip(replies, numbers, strict=True)) / len(numbers)


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    train_numbers, eval_numbers = make_prompts()
    write_prompts(HERE / "prompts.jsonl", train_numbers)
    write_prompts(HERE / "eval.jsonl", eval_numbers)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    train(model, tokenizer)
    model.eval()
    greedy = reversal_accuracy(model, tokenizer, eval_numbers, greedy=True)
    sampled = reversal_accuracy(model, tokenizer, train_numbers, greedy=False)
    print(f"{model.num_parameters():,} parameters; reversed greedily {greedy:.3f}, sampled {sampled:.3f}")
    tokenizer.save_pretrained(HERE / "model")
    model.save_pretrained(HERE / "model")


if __name__ == "__main__":
    main()
