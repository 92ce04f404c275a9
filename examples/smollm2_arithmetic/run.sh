#!/usr/bin/env bash
# Fully asynchronous GRPO on a CPU: SmolLM2-135M learns to add. prepare.py makes the folder with model and prompts.
#   bash examples/smollm2_arithmetic/run.sh FOLDER [--run-name NAME ...]
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
if [[ ! -f "${1:-}/model/config.json" ]]; then
    echo "usage: $0 FOLDER [flags]: FOLDER is what prepare.py made; ${1:-(none)} has no model/config.json" >&2
    exit 2
fi
folder="$(cd "$1" && pwd)"
shift

flags=(
    --hf-checkpoint "$folder/model"
    --dtype auto
    --freeze-embeddings

    --prompt-data "$folder/prompts.jsonl"
    --input-key prompt
    --label-key label
    --rm-type math

    --fully-async
    --max-weight-staleness 4
    --pause-generation-mode in_place
    --rollout-shuffle
    --num-rollout 60
    --rollout-batch-size 8
    --n-samples-per-prompt 8
    --rollout-max-response-len 6
    --rollout-temperature 1
    --rollout-skip-special-tokens
    --rollout-stop $'\n'

    --use-rollout-logprobs
    --eps-clip 0.2
    --eps-clip-high 0.28
    --calculate-per-token-loss
    --lr 2e-5
    --adam-beta1 0.9
    --adam-beta2 0.99
    --clip-grad 1.0
    --use-dynamic-batch-size
    --max-tokens-per-gpu 4096

    --eval-interval 20
    --eval-prompt-data addition "$folder/eval.jsonl"
    --eval-temperature 0
    --n-samples-per-eval-prompt 1
)
exec "${PYTHON:-python}" "$here/../../train_async.py" "${flags[@]}" "$@"
