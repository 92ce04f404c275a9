"""A process group between one trainer rank and engines: an address and a rank in, broadcasts from rank 0 out.

It stands beside any other group of its process. Made the way in which SGLang makes its own (its store is prefixed with the
group's name), so that either end may be somebody else's.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.distributed_c10d import GroupName, _new_process_group_helper, _world

from miles.errors import EngineFailed


class WeightGroup:
    """One member of such a group. All calls block and raise EngineFailed; a group that failed once is of no use any more.

    ``timeout_s`` bounds the meeting and each broadcast. Rank 0 listens on ``port``.
    """

    def __init__(
        self, *, address: str, port: int, rank: int, world_size: int, name: str, backend: str, timeout_s: float
    ) -> None:
        limit = timedelta(seconds=timeout_s)
        self.world_size = world_size
        self._name = name
        try:
            self._store = TCPStore(
                address, port, world_size, is_master=rank == 0, timeout=limit, wait_for_workers=False
            )
            self._group, _ = _new_process_group_helper(
                world_size,
                rank,
                [],
                backend,
                PrefixStore(name, self._store),
                group_name=GroupName(name),
                timeout=limit,
            )
            _world.pg_group_ranks[self._group] = {member: member for member in range(world_size)}
        except (RuntimeError, ValueError) as error:  # torch has no narrower errors for a meeting that failed
            raise EngineFailed(f"weight group {name!r} of {world_size} at {address}:{port}: {error}") from error

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Rank 0's bytes into everybody's ``tensors``, which have the same shapes and dtypes everywhere."""
        try:
            for work in [self._group.broadcast([t], dist.BroadcastOptions()) for t in tensors]:
                work.wait()
            if tensors and tensors[0].is_cuda:
                torch.cuda.current_stream().synchronize()
        except RuntimeError as error:  # torch has no narrower error for a member that is gone
            raise EngineFailed(f"weight group {self._name!r}: a broadcast failed: {error}") from error

    def close(self) -> None:
        """Leaves without waiting for anybody. Twice is fine."""
        group, self._group = self._group, None
        if group is not None:
            group.abort()
            dist.destroy_process_group(group)
