"""An engine's end of weight syncs, for engines that load tensors by themselves.

vLLM's workers have one of their own (`serve.receiver`), which loads while the next bucket arrives.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from ray.util.collective import types

from ray_apr.exceptions import SyncBrokenError
from ray_apr.weights.collective import NCCL, as_tensor, byte_buffer, join
from ray_apr.weights.plan import WeightGroup


class WeightInbox:
    """One member of the weight group. Its calls block: run them in a thread.

    Args:
        device: Where the weights are received: "cpu" where the trainer is on CPU, else this
            member's GPU.
    """

    def __init__(self, device: str = "cpu") -> None:
        self._device = device
        self._collective: Any = None
        self._group: WeightGroup

    def join(self, group: Mapping[str, Any], rank: int) -> None:
        """Join a group, and leave the one before; waits for all members.

        Args:
            group: What `Engine.join_weight_group` was given.
            rank: Of this member.

        Raises:
            SyncBrokenError: If they do not meet in time.
        """
        self.close()
        self._group = WeightGroup.from_dict(group)
        self._collective = join(self._group, rank)

    def receive(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights of one sync, each by its name in a checkpoint; all have to be taken.

        A tensor is a view of a buffer that is free again with the last one of its bucket.

        Raises:
            SyncBrokenError: If no group was joined, or the sender is gone.
        """
        if self._collective is None:
            raise SyncBrokenError("this engine is in no weight group")
        options = types.BroadcastOptions()
        options.root_rank, options.root_tensor = 0, 0
        deadline = time.monotonic() + self._group.timeout_s
        for bucket in self._group.buckets():
            buffer = byte_buffer(bucket.num_bytes, self._device)
            options.timeout_ms = max(1, int(1000 * (deadline - time.monotonic())))
            try:
                self._collective.broadcast([buffer], options)
                if self._group.backend == NCCL:
                    self._collective.wait(deadline)
            except RuntimeError as error:
                self.close()
                raise SyncBrokenError(f"weights did not arrive: {error}") from error
            for part in bucket.slices:
                param = part.param
                yield param.name, as_tensor(buffer, part.offset, param.shape, param.dtype)

    def close(self) -> None:
        """Leave the group."""
        if self._collective is not None:
            self._collective.destroy_group()
            self._collective = None
