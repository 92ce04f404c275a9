#!/usr/bin/env bash
# Fully asynchronous GRPO on a CPU: a 0.1 M model learns to reverse six digits. Further flags go to train_async.py.
#   bash examples/quickstart/run.sh [--run-name NAME ...]
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

flags=(
    --hf-checkpoint "$here/model"
    --dtype float32

    --prompt-data "$here/prompts.jsonl"
    --input-key prompt
    --label-key label
    --rm-type exact_match

    --fully-async
    --max-weight-staleness 4
    --pause-generation-mode in_place
    --rollout-shuffle
    --num-rollout 80
    --rollout-batch-size 32
    --n-samples-per-prompt 8
    --rollout-max-response-len 8
    --rollout-temperature 1
    --rollout-skip-special-tokens

    --use-rollout-logprobs
    --eps-clip 0.2
    --eps-clip-high 0.28
    --calculate-per-token-loss
    --lr 3e-4
    --adam-beta1 0.9
    --adam-beta2 0.99
    --clip-grad 1.0
    --use-dynamic-batch-size
    --max-tokens-per-gpu 8192

    --eval-interval 10
    --eval-prompt-data reverse "$here/eval.jsonl"
    --eval-temperature 0
    --n-samples-per-eval-prompt 1
)
exec "${PYTHON:-python}" "$here/../../train_async.py" "${flags[@]}" "$@"
