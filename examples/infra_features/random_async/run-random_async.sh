#!/usr/bin/env bash
# Random prompts, lengths and rewards through a whole run: tests the machinery, needs no data. Further flags go to train_async.py.
#   bash examples/infra_features/random_async/run-random_async.sh [--num-rollout 10 ...]
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
root="$here/../../.."
export PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}"

flags=(
    --train-backend fsdp
    --hf-checkpoint "${MODEL:-$root/examples/quickstart/model}"

    --rollout-function-path random_async_rollout.generate_rollout_random_async
    --disable-rollout-global-dataset
    --num-rollout 20
    --rollout-batch-size 8
    --n-samples-per-prompt 4
    --rollout-max-response-len 8
    --global-batch-size 32
    --update-weights-interval 2
    --pause-generation-mode in_place

    --advantage-estimator grpo
    --use-tis
    --lr 1e-6
    --use-dynamic-batch-size
    --max-tokens-per-gpu 2048

    --actor-num-gpus-per-node "${TRAINER_GPUS:-1}"
    --rollout-num-gpus "${ROLLOUT_GPUS:-1}"
)
exec "${PYTHON:-python}" "$root/train_async.py" "${flags[@]}" "$@"
