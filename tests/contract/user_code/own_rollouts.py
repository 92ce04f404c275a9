"""Rollout functions that drive the worker themselves, as first-era recipes do, and one of today's form."""

import time

from journal import note

from miles.rollout.base_types import RolloutFnConstructorInput, RolloutFnTrainInput, RolloutFnTrainOutput
from miles.rollout.fully_async_rollout import (
    AsyncRolloutWorker,
    FullyAsyncRolloutFn,
    get_global_worker,
    group_oldest_weight_version,
)

spare = []
mine = None


def with_the_global_worker(args, rollout_id, data_buffer, evaluation=False):
    return sorted(collect(args, get_global_worker(args, data_buffer)), key=lambda group: group[0].index)


def with_a_worker_of_my_own(args, rollout_id, data_buffer, evaluation=False):
    global mine
    if mine is None:
        mine = AsyncRolloutWorker(args, data_buffer)
        mine.start()
    groups = collect(args, mine)
    if rollout_id + 1 == args.num_rollout:
        mine.stop()
        note("stopped", running=mine.running)
    return groups


def collect(args, worker):
    """As many groups as a step needs; what is over stays here for the next one."""
    while len(spare) < args.rollout_batch_size:
        note("waiting", queue=worker.get_queue_size())
        spare.extend(group for _, group in worker.get_completed_groups())
        time.sleep(0.02)
    groups = spare[: args.rollout_batch_size]
    del spare[: args.rollout_batch_size]
    note("batch", oldest=[group_oldest_weight_version(group) for group in groups])
    return groups


class Wrapped:
    """Today's class form, around the class that comes with miles."""

    def __init__(self, input: RolloutFnConstructorInput):
        self.args = input.args
        self.inner = FullyAsyncRolloutFn(input)

    async def __call__(self, input: RolloutFnTrainInput) -> RolloutFnTrainOutput:
        output = await self.inner(input)
        note("step", rollout_id=input.rollout_id, version=input.weight_version, groups=len(output.samples))
        return output
