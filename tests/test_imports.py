"""Every name that users' code imports from us is there, stands on production code, and comes without a run."""

import importlib

import pytest

NAMES = {
    "miles.utils.types": "Sample RewardSpec AdapterRef SpecInfo PrefixCacheInfo RolloutBatch",
    "miles.utils.arguments": "parse_args",
    "miles.utils.async_utils": "run",
    "miles.utils.http_utils": "post get",
    "miles.utils.misc": "load_function function_registry",
    "miles.rollout.base_types": "RolloutFnConstructorInput RolloutFnTrainInput RolloutFnEvalInput RolloutFnTrainOutput "
    "RolloutFnEvalOutput GenerateFnInput GenerateFnOutput",
    "miles.rollout.data_source": "DataSource RolloutDataSource RolloutDataSourceWithBuffer pop_first",
    "miles.rollout.fully_async_rollout": "FullyAsyncRolloutFn generate_rollout_fully_async AsyncRolloutWorker "
    "get_global_worker stop_global_worker group_oldest_weight_version _CachedWeightVersion",
    "miles.rollout.fully_async_data_buffer": "DataBuffer DataBufferInput DataBufferConstructorInput DefaultDataBuffer "
    "Group first_sample iter_samples group_oldest_weight_version",
    "miles.rollout.sglang_rollout": "GenerateState generate generate_and_rm_group",
    "miles.rollout.inference_rollout.inference_rollout_common": "GenerateState generate_and_rm generate_and_rm_group",
    "miles.rollout.filter_hub.base_types": "DynamicFilterOutput",
    "miles.rollout.filter_hub.dynamic_sampling_filters": "check_reward_nonzero_std check_no_aborted",
    "miles.rollout.rm_hub": "async_rm batched_async_rm",
    "miles.rollout.rm_hub.math_dapo_utils": "compute_score",
    "miles.rollout.generate_hub.single_turn": "generate",
    "miles.rollout.generate_hub.multi_turn": "generate",
    "miles.rollout.generate_hub.agentic_tool_call": "generate",
}
"""Module to the names that launch scripts and hooks of this ecosystem import from it."""


@pytest.mark.parametrize("module", NAMES)
def test_names_that_users_import_are_there(module):
    found = importlib.import_module(module)
    assert [name for name in NAMES[module].split() if not hasattr(found, name)] == []


def test_the_first_eras_worker_has_its_members():
    worker = importlib.import_module("miles.rollout.fully_async_rollout").AsyncRolloutWorker
    members = "start stop get_completed_groups get_queue_size continuous_worker_loop worker_thread_func output_queue"
    assert set(members.split()) <= set(vars(worker))
