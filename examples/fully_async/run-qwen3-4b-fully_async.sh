#!/usr/bin/env bash
# Fully asynchronous GRPO of Qwen3-4B on math. Paths and sizes are variables; further flags go to train_async.py.
#   MODEL=Qwen3-4B DATA=dapo-math-17k/dapo-math-17k.jsonl bash examples/fully_async/run-qwen3-4b-fully_async.sh [--dry-run]
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

model="${MODEL:-/root/Qwen3-4B}"
save="${SAVE:-checkpoints/qwen3-4b-fully-async}"
data="${DATA:-/root/dapo-math-17k/dapo-math-17k.jsonl}"
selector=(--fully-async)
[[ -z "${ROLLOUT_FUNCTION:-}" ]] || selector=(--rollout-function-path "$ROLLOUT_FUNCTION")

flags=(
    --train-backend fsdp
    --hf-checkpoint "$model"
    --ref-load "$model"
    --load "$save"
    --save "$save"
    --save-interval "${SAVE_INTERVAL:-20}"

    "${selector[@]}"
    --pause-generation-mode in_place
    --prompt-data "$data"
    --input-key prompt
    --label-key label
    --apply-chat-template
    --rollout-shuffle
    --rm-type dapo
    --reward-key score
    --num-rollout "${NUM_ROLLOUT:-3000}"
    --rollout-batch-size "${ROLLOUT_BATCH_SIZE:-32}"
    --n-samples-per-prompt "${SAMPLES_PER_PROMPT:-8}"
    --global-batch-size "${GLOBAL_BATCH_SIZE:-256}"
    --rollout-max-response-len "${MAX_RESPONSE_LEN:-8192}"
    --rollout-temperature 1
    --balance-data
    --use-dynamic-batch-size
    --max-tokens-per-gpu "${MAX_TOKENS_PER_GPU:-9216}"

    --advantage-estimator grpo
    --use-kl-loss
    --kl-loss-coef 0.00
    --kl-loss-type low_var_kl
    --entropy-coef 0.00
    --eps-clip 0.2
    --eps-clip-high 0.28
    --use-tis
    --optimizer adam
    --lr 1e-6
    --lr-decay-style constant
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.98

    # only the Megatron backend reads these: here they are accepted, and one warning names them
    --tensor-model-parallel-size 2
    --sequence-parallel
    --pipeline-model-parallel-size 1
    --context-parallel-size 1
    --expert-model-parallel-size 1
    --expert-tensor-parallel-size 1
    --recompute-granularity full
    --recompute-method uniform
    --recompute-num-layers 1
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --accumulate-allreduce-grads-in-fp32
    --attention-softmax-in-fp32
    --attention-backend flash

    --actor-num-nodes 1
    --actor-num-gpus-per-node "${TRAINER_GPUS:-2}"
    --rollout-num-gpus "${ROLLOUT_GPUS:-6}"
    --rollout-num-gpus-per-engine 1
    --num-gpus-per-node "${GPUS_PER_NODE:-8}"
    --update-weight-transfer-mode "${TRANSFER_MODE:-broadcast}"
    --sglang-mem-fraction-static 0.7
)
exec "${PYTHON:-python}" "$here/../../train_async.py" "${flags[@]}" "$@"
