"""The trainer's end of a weight sync: gather the shards, broadcast the buckets.

Invariants, kept by `WeightSender`:
    * Parameters travel under their Hugging Face names, in the model's order; tied ones once, and
      adapters merged into what they adapt.
    * What is sent is what `gather` saw: it copies, so that the optimizer may go on while `send`,
      in another thread, sends.
    * `gather` is a collective of all train workers; everything else concerns rank 0 alone.
    * One method runs at a time; who calls them from two threads keeps that.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist

from ray_apr.exceptions import WeightSyncError
from ray_apr.weights.adapters import merged_parameters
from ray_apr.weights.collective import (
    GLOO,
    NCCL,
    address,
    byte_buffer,
    meet,
    open_rendezvous,
    register_backends,
)
from ray_apr.weights.gather import gather_bucket
from ray_apr.weights.plan import ParamSpec, WeightGroup, plan_buckets

_MIB = 1 << 20


class WeightSender:
    """Sends the weights of a (sharded) model to all engine workers.

    Args:
        model: The train worker's model, FSDP2 or plain; a Hugging Face model.
        bucket_mb: Size of one broadcast, in MiB.
        wire_dtype: Data type on the wire; None sends each parameter as it is.
    """

    def __init__(
        self, model: torch.nn.Module, *, bucket_mb: float, wire_dtype: str | None = None
    ) -> None:
        named = dict(model.named_parameters())  # names tied parameters once
        self._params = merged_parameters(model, named)
        self.params = tuple(
            ParamSpec(
                name,
                tuple(p.base.shape),
                wire_dtype or str(p.base.dtype).removeprefix("torch."),
            )
            for name, p in self._params.items()
        )
        self._bucket_bytes = int(bucket_mb * _MIB)
        self._buckets = plan_buckets(self.params, self._bucket_bytes)
        self._is_sender = not dist.is_initialized() or dist.get_rank() == 0
        self._device = next(iter(named.values())).device
        self.staged: list[torch.Tensor] = []
        self._group: WeightGroup | None = None

    def open_group(self, num_engine_workers: int, *, host: str, timeout_s: float) -> WeightGroup:
        """Open the rendezvous of a new group (rank 0); the engine workers are told of it next.

        Args:
            num_engine_workers: Replicas x tensor-parallel size.
            host: Address of this node.
            timeout_s: Limit of one collective call.
        """
        on_gpu = self._device.type == "cuda"
        return WeightGroup(
            host=host,
            port=0 if on_gpu else open_rendezvous(timeout_s),
            world_size=1 + num_engine_workers,
            backend=NCCL if on_gpu else GLOO,
            group_name=f"apr-weights-{uuid.uuid4().hex[:8]}",
            timeout_s=timeout_s,
            bucket_bytes=self._bucket_bytes,
            params=self.params,
        )

    def connect(self, group: WeightGroup) -> None:
        """Join as rank 0; waits for all engine workers.

        Raises:
            WeightSyncError: If they do not come in time.
        """
        from ray.util import collective

        self.close()  # a group that broke
        register_backends()
        try:
            collective.init_collective_group(
                group.world_size, 0, backend=group.backend, group_name=address(group)
            )
            with self._on_device():
                meet(collective.get_group_handle(address(group)), group)
        except (RuntimeError, ValueError, OSError) as error:
            raise WeightSyncError(
                f"the {group.world_size - 1} engine workers did not join the weight group within "
                f"{group.timeout_s:g} s: {error}"
            ) from error
        self._group = group

    @torch.no_grad()
    def gather(self) -> None:
        """Copy the current weights to rank 0; a collective of all train workers."""
        staged = []
        for bucket in self._buckets:
            buffer = byte_buffer(bucket.num_bytes, self._device) if self._is_sender else None
            gather_bucket(bucket, self._params, buffer)
            if buffer is not None:
                staged.append(buffer)
        if staged and self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()  # `send` has streams of its own
        self.staged = staged

    def send(self) -> None:
        """Broadcast what `gather` staged (rank 0); returns when all of it has left.

        Raises:
            WeightSyncError: If the group is not joined, nothing was gathered, or a peer is gone.
        """
        from ray.util import collective

        if self._group is None or not self.staged:
            raise WeightSyncError("connect() and gather() come before send()")
        staged, self.staged = self.staged, []
        name, deadline = address(self._group), time.monotonic() + self._group.timeout_s
        try:
            with self._on_device():
                for buffer in staged:
                    collective.broadcast(buffer, src_rank=0, group_name=name)
                collective.get_group_handle(name).wait(deadline)
        except RuntimeError as error:
            raise WeightSyncError(f"the weight broadcast broke off: {error}") from error

    def _on_device(self) -> AbstractContextManager[object]:
        """The model's device as the current one: a thread begins on the first GPU."""
        is_cuda = self._device.type == "cuda"
        return torch.cuda.device(self._device) if is_cuda else contextlib.nullcontext()

    def close(self) -> None:
        """Leave the group."""
        from ray.util import collective

        if self._group is not None:
            collective.destroy_collective_group(address(self._group))
            self._group = None
