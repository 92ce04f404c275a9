"""Fully asynchronous GRPO of Qwen3-30B-A3B on math: options in, training run. Every field below is an option.

    python examples/fully_async/run_qwen3_30b_a3b_fully_async.py --model-dir models --data-dir data [--dry-run]

A field is also read from the environment: MILES_SCRIPT_NUM_ROLLOUT=10 is --num-rollout 10.
"""

from dataclasses import dataclass

import typer

import miles.utils.external_utils.command_utils as U


@dataclass
class ScriptArgs(U.ExecuteTrainConfig):
    model_name: str = "Qwen3-30B-A3B"
    model_dir: str = "/root/models"
    data_dir: str = "/root/data"
    output_dir: str = "checkpoints"
    num_gpus_per_node: int = 8
    trainer_gpus: int = 4
    rollout_gpus: int = 4
    gpus_per_engine: int = 2
    num_rollout: int = 3000
    rollout_batch_size: int = 32
    n_samples_per_prompt: int = 8
    max_response_len: int = 8192
    max_tokens_per_gpu: int = 9216
    max_weight_staleness: int = 4
    pause_generation_mode: str = "in_place"
    transfer_mode: str = "broadcast"
    extra_args: str = ""


@U.dataclass_cli
def main(args: ScriptArgs):
    """Trains with the settings of this script; --extra-args adds flags of train_async.py, and later ones win."""
    model = f"{args.model_dir}/{args.model_name}"
    save = f"{args.output_dir}/{args.model_name}-fully-async"

    checkpoint_args = f"--hf-checkpoint {model} --ref-load {model} --load {save} --save {save} --save-interval 20 "
    rollout_args = (
        "--fully-async "
        f"--max-weight-staleness {args.max_weight_staleness} "
        f"--pause-generation-mode {args.pause_generation_mode} "
        f"--prompt-data {args.data_dir}/dapo-math-17k/dapo-math-17k.jsonl "
        "--input-key prompt "
        "--label-key label "
        "--apply-chat-template "
        "--rollout-shuffle "
        "--rm-type dapo "
        "--reward-key score "
        f"--num-rollout {args.num_rollout} "
        f"--rollout-batch-size {args.rollout_batch_size} "
        f"--n-samples-per-prompt {args.n_samples_per_prompt} "
        f"--global-batch-size {args.rollout_batch_size * args.n_samples_per_prompt} "
        f"--rollout-max-response-len {args.max_response_len} "
        "--rollout-temperature 1 "
        "--balance-data "
    )
    perf_args = (
        "--tensor-model-parallel-size 4 "
        "--sequence-parallel "
        "--pipeline-model-parallel-size 1 "
        "--context-parallel-size 1 "
        "--expert-model-parallel-size 4 "
        "--expert-tensor-parallel-size 1 "
        "--recompute-granularity full "
        "--recompute-method uniform "
        "--recompute-num-layers 1 "
        "--use-dynamic-batch-size "
        f"--max-tokens-per-gpu {args.max_tokens_per_gpu} "
    )
    grpo_args = (
        "--advantage-estimator grpo "
        "--use-kl-loss "
        "--kl-loss-coef 0.00 "
        "--kl-loss-type low_var_kl "
        "--entropy-coef 0.00 "
        "--eps-clip 0.2 "
        "--eps-clip-high 0.28 "
        "--use-tis "
    )
    optimizer_args = (
        "--optimizer adam "
        "--lr 1e-6 "
        "--lr-decay-style constant "
        "--weight-decay 0.1 "
        "--adam-beta1 0.9 "
        "--adam-beta2 0.98 "
        "--optimizer-cpu-offload "
        "--overlap-cpu-optimizer-d2h-h2d "
        "--use-precision-aware-optimizer "
    )
    cluster_args = (
        f"--actor-num-nodes {args.num_nodes} "
        f"--actor-num-gpus-per-node {args.trainer_gpus} "
        f"--rollout-num-gpus {args.rollout_gpus} "
        f"--rollout-num-gpus-per-engine {args.gpus_per_engine} "
        f"--update-weight-transfer-mode {args.transfer_mode} "
        "--sglang-mem-fraction-static 0.7 "
        "--sglang-cuda-graph-max-bs 512 "
    )
    megatron_args = (
        "--attention-dropout 0.0 "
        "--hidden-dropout 0.0 "
        "--accumulate-allreduce-grads-in-fp32 "
        "--attention-softmax-in-fp32 "
        "--attention-backend flash "
    )

    U.execute_train(
        train_args=(
            f"{checkpoint_args}{rollout_args}{perf_args}{grpo_args}{optimizer_args}{cluster_args}{megatron_args}"
            f"{U.get_default_wandb_args(__file__)}{args.extra_args}"
        ),
        num_gpus_per_node=args.num_gpus_per_node,
        megatron_model_type="qwen3-30B-A3B",
        train_script="train_async.py",
        config=args,
    )


if __name__ == "__main__":
    typer.run(main)
