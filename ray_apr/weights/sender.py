"""The trainer's end of a weight sync: gather the shards, broadcast the buckets.

Invariants, kept by `WeightSender`:
    * Parameters travel as the tensors of the model's checkpoint, under their names (see `wire`);
      tied ones once, and adapters merged into what they adapt.
    * What is sent is what `gather` saw: it copies, so that the optimizer may go on while `send`,
      in another thread, sends.
    * `gather` is a collective of all train workers, and all of them `release`; everything else
      concerns rank 0 alone.
    * One method runs at a time; who calls them from two threads keeps that.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist

from ray_apr.exceptions import SyncBrokenError, WeightSyncError
from ray_apr.weights.adapters import merged_parameters
from ray_apr.weights.collective import (
    NCCL,
    address,
    byte_buffer,
    meet,
    new_nccl_id,
    register_backends,
    wait_for_members,
)
from ray_apr.weights.gather import compute_device, gather_bucket, parts_of
from ray_apr.weights.gloo import GLOO, close_rendezvous, open_rendezvous
from ray_apr.weights.plan import ParamSpec, WeightGroup, plan_buckets

_MIB = 1 << 20
_CLOSE_S = 5.0
"""What members take, beyond the limit of the group, to give it up by themselves."""


class WeightSender:
    """Sends the weights of a (sharded) model to all engine workers.

    Args:
        model: The train worker's model, FSDP2 or plain; a Hugging Face model.
        bucket_mb: Size of one broadcast, in MiB.
        wire_dtype: Data type on the wire; None sends each parameter as it is.
        to_all: Gather to all ranks, not to rank 0 alone.

    Raises:
        WeightSyncError: If the model's checkpoint cannot be made of its parameters.
    """

    handles: Mapping[str, list[Any]] | None = None
    """Where the engines read what was gathered, if they do (`weights.shared`)."""

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        bucket_mb: float,
        wire_dtype: str | None = None,
        to_all: bool = False,
    ) -> None:
        named = dict(model.named_parameters())  # names tied parameters once
        self._parts = parts_of(model, merged_parameters(model, named))
        self.params = tuple(
            ParamSpec(
                name,
                part.tensor.shape,
                wire_dtype or str(part.param.base.dtype).removeprefix("torch."),
            )
            for name, part in self._parts.items()
        )
        self._bucket_bytes = int(bucket_mb * _MIB)
        self._buckets = plan_buckets(self.params, self._bucket_bytes)
        self._to_all = to_all
        self._has_all = to_all or not dist.is_initialized() or dist.get_rank() == 0
        self._device = compute_device(model)
        self.staged: list[torch.Tensor] = []
        self._group: WeightGroup | None = None
        register_backends()  # here: engines stop for what forming a group takes

    def open_group(self, num_engine_workers: int, *, host: str, timeout_s: float) -> WeightGroup:
        """Describe a new group (rank 0), with where or how its members meet; the engine workers are
        told next.

        Args:
            num_engine_workers: Replicas x tensor-parallel size.
            host: Address of this node.
            timeout_s: Limit of one collective call.

        Raises:
            WeightSyncError: If CuPy is missing, by which Ray calls NCCL.
        """
        if self._device.type == "cuda":
            group = self._describe_group(num_engine_workers, host, 0, NCCL, timeout_s)
            return dataclasses.replace(group, nccl_id=new_nccl_id())
        port = open_rendezvous(timeout_s)
        return self._describe_group(num_engine_workers, host, port, GLOO, timeout_s)

    def _describe_group(
        self, num_engine_workers: int, host: str, port: int, backend: str, timeout_s: float
    ) -> WeightGroup:
        return WeightGroup(
            host=host,
            port=port,
            world_size=1 + num_engine_workers,
            backend=backend,
            group_name=f"apr-weights-{uuid.uuid4().hex[:8]}",
            timeout_s=timeout_s,
            bucket_bytes=self._bucket_bytes,
            params=self.params,
        )

    def connect(self, group: WeightGroup, is_hopeless: Callable[[], bool] = lambda: False) -> None:
        """Join as rank 0; waits for all engine workers.

        Args:
            group: What `open_group` returned.
            is_hopeless: Says that one of them will not come; asked while the group forms.

        Raises:
            SyncBrokenError: If they do not come in time.
        """
        from ray.util import collective

        self.close()  # a group that broke
        name = address(group)

        def join() -> None:
            collective.init_collective_group(
                group.world_size, 0, backend=group.backend, group_name=name
            )

        try:
            wait_for_members(join, timeout_s=group.timeout_s + _CLOSE_S, is_hopeless=is_hopeless)
            with self._on_device():
                meet(
                    collective.get_group_handle(name),
                    group,
                    timeout_s=group.timeout_s,
                    is_hopeless=is_hopeless,
                )
        except (RuntimeError, ValueError, OSError) as error:
            close_rendezvous(group.port)  # first: a group that still forms has ray's lock
            if collective.is_group_initialized(name):
                collective.destroy_collective_group(name)
            raise SyncBrokenError(
                f"the {group.world_size - 1} engine workers did not join the weight group (limit "
                f"{group.timeout_s:g} s): {error}"
            ) from error
        self._group = group

    @torch.no_grad()
    def gather(self) -> None:
        """Copy the current weights to rank 0; a collective of all train workers."""
        self.release()
        staged = []
        for bucket in self._buckets:
            buffer = self._new_buffer(bucket.num_bytes) if self._has_all else None
            gather_bucket(bucket, self._parts, buffer, self._device, to_all=self._to_all)
            if buffer is not None:
                staged.append(buffer)
        if staged and self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()  # `send` has streams of its own
        self.staged = staged

    def _new_buffer(self, num_bytes: int) -> torch.Tensor:
        return byte_buffer(num_bytes, self._device)

    def send(self) -> None:
        """Broadcast what `gather` staged (rank 0); returns when all of it has left.

        It stays until `release`: the sync may need another group. A group that breaks off is left,
        so that no peer waits for the rest.

        Raises:
            SyncBrokenError: If a peer is gone, or the group was left when one had gone.
            WeightSyncError: If nothing was gathered.
        """
        from ray.util import collective

        if not self.staged:
            raise WeightSyncError("gather() comes before send()")
        if self._group is None:
            raise SyncBrokenError("connect() comes before send()")
        name, deadline = address(self._group), time.monotonic() + self._group.timeout_s
        try:
            with self._on_device():
                for buffer in self.staged:
                    collective.broadcast(buffer, src_rank=0, group_name=name)
                collective.get_group_handle(name).wait(deadline)
        except RuntimeError as error:
            self.close()
            raise SyncBrokenError(f"the weight broadcast broke off: {error}") from error

    def release(self) -> None:
        """Free what was gathered: it is with the engines. All ranks call it."""
        self.staged = []

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
