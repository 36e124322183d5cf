"""Weights that are broadcast between hosts' memories, by a Gloo group of the members' own.

The group lives beside torch.distributed's default one; see `weights.collective`.
"""

from __future__ import annotations

import datetime
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch.distributed as dist
from ray.util.collective import types

from ray_apr.compat.ray import BaseGroup
from ray_apr.compat.torch import gloo_options
from ray_apr.weights.buffers import byte_buffer
from ray_apr.weights.collective import from_rank_0, join, register
from ray_apr.weights.transports.base import BucketParcel, Member, Parcel
from ray_apr.weights.transports.group import GroupEndpoint, GroupSender

GLOO = "APR_GLOO"

_REDUCE = {
    types.ReduceOp.SUM: dist.ReduceOp.SUM,
    types.ReduceOp.PRODUCT: dist.ReduceOp.PRODUCT,
    types.ReduceOp.MIN: dist.ReduceOp.MIN,
    types.ReduceOp.MAX: dist.ReduceOp.MAX,
}

_hosted: dict[int, dist.TCPStore] = {}
"""Stores that this process hosts as rank 0, by port, until their group is left."""


def open_rendezvous(timeout_s: float) -> int:
    """Open the store that the members of a new group meet at; returns its port."""
    store = dist.TCPStore(
        "0.0.0.0",
        0,
        is_master=True,
        wait_for_workers=False,
        timeout=datetime.timedelta(seconds=timeout_s),
    )
    _hosted[store.port] = store
    return store.port


def close_rendezvous(port: int) -> None:
    """Close it: whoever still waits for a member there gets an error at once."""
    _hosted.pop(port, None)


class GlooGroup(BaseGroup):
    """A Gloo group with its own store, for tensors in host memory.

    Args:
        world_size: Number of members.
        rank: Rank of this member.
        group_name: A `GlooEndpoint.address`: name, host, port and time limit.
    """

    def __init__(self, world_size: int, rank: int, group_name: str) -> None:
        super().__init__(world_size, rank, group_name)
        name, host, port, timeout_s = group_name.rsplit("|", 3)
        timeout = datetime.timedelta(seconds=float(timeout_s))
        # also rank 0, whose wait for the others ends when it closes the store that it hosts
        store = dist.TCPStore(host, int(port), is_master=False, timeout=timeout)
        device = dist.ProcessGroupGloo.create_device(hostname=_own_address(host))
        options = gloo_options(timeout, [device])
        prefixed = dist.PrefixStore(name, store)
        self._port = int(port)
        self._store: Any = store
        self._timeout = timeout
        self._group: Any = dist.ProcessGroupGloo(prefixed, rank, world_size, options)

    @classmethod
    def backend(cls) -> str:
        """Name in the registry."""
        return GLOO

    @classmethod
    def check_backend_availability(cls) -> bool:
        """Whether this torch has Gloo."""
        return dist.is_gloo_available()

    def destroy_group(self) -> None:
        """Close the connections; the peers' next call raises."""
        group, self._group, self._store = self._group, None, None
        if group is not None:
            group.shutdown()
        if self._rank == 0:
            close_rendezvous(self._port)

    def broadcast(self, tensor: list[Any], broadcast_options: Any = None) -> None:
        """Send the root's tensor to all members, in place.

        Raises:
            RuntimeError: If a peer died or the time limit passed: the call's own or the group's.
        """
        given = broadcast_options or types.BroadcastOptions()
        timeout = self._timeout
        if given.timeout_ms != types.unset_timeout_ms:
            timeout = min(timeout, datetime.timedelta(milliseconds=given.timeout_ms))
        options = dist.BroadcastOptions()
        options.rootRank = given.root_rank
        options.rootTensor = 0
        options.timeout = timeout
        self._group.broadcast(tensor, options).wait(timeout)

    def wait(self, deadline: float) -> None:
        """Nothing to wait for: `broadcast` returns once the bytes are there."""

    def allreduce(self, tensor: list[Any], allreduce_options: Any = None) -> None:
        """Reduce over all members, in place."""
        options = dist.AllreduceOptions()
        reduce_op = allreduce_options.reduceOp if allreduce_options else types.ReduceOp.SUM
        options.reduceOp = _REDUCE[reduce_op]
        options.timeout = self._timeout
        self._group.allreduce(tensor, options).wait(self._timeout)

    def barrier(self, barrier_options: Any = None) -> None:
        """Wait for all members."""
        options = dist.BarrierOptions()
        options.timeout = self._timeout
        self._group.barrier(options).wait(self._timeout)

    def reduce(self, *args: Any, **kwargs: Any) -> None:
        """Not offered: weights are broadcast."""
        raise NotImplementedError("APR_GLOO offers broadcast, allreduce and barrier")

    allgather = reducescatter = send = recv = reduce


def _own_address(host: str) -> str:
    """Address of the interface by which this process reaches `host`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # UDP: chooses a route, sends nothing
        return probe.getsockname()[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class GlooEndpoint(GroupEndpoint):
    """A Gloo group of the trainer and all engine workers."""

    backend: ClassVar[str] = GLOO

    port: int
    """Where rank 0 holds the rendezvous."""

    @property
    def place(self) -> str:
        """Where the members meet, for messages."""
        return f"{self.host}:{self.port}"

    @property
    def address(self) -> str:
        """Name in ray.util.collective."""
        return f"{self.group_name}|{self.host}|{self.port}|{self.timeout_s}"

    def register(self) -> None:
        """Make the backend known in this process."""
        register(GLOO, GlooGroup)

    def give_up(self) -> None:
        """End the wait of members that still come."""
        close_rendezvous(self.port)

    def join(self, member: Member) -> GlooReceiver:
        """Join the group; waits for all members."""
        return GlooReceiver(self, join(self, member.rank))


class GlooReceiver:
    """Receives bucket after bucket, each into memory of its own.

    Args:
        endpoint: Of the group.
        joined: This member's end of it.
    """

    def __init__(self, endpoint: GlooEndpoint, joined: Any) -> None:
        self._buckets = endpoint.buckets()
        self._timeout_s = endpoint.timeout_s
        self._joined = joined

    def receive(self, notice: Any) -> Iterator[Parcel]:
        """Give the buckets as they arrive; `RuntimeError` if the sender is gone."""
        del notice
        options = from_rank_0()
        deadline = time.monotonic() + self._timeout_s  # of all buckets: a sync ends by its limit
        for bucket in self._buckets:
            options.timeout_ms = max(1, int(1000 * (deadline - time.monotonic())))
            buffer = byte_buffer(bucket.num_bytes, "cpu")
            self._joined.broadcast([buffer], options)
            yield BucketParcel(bucket, buffer)

    def close(self) -> None:
        """Leave the group."""
        self._joined.destroy_group()


class GlooSender(GroupSender):
    """Sends from the memory of rank 0's host."""

    def open(self, num_engine_workers: int, *, host: str, timeout_s: float) -> GlooEndpoint:
        """Open a rendezvous of a new group; see `WeightSender.open`."""
        common = self.common(num_engine_workers, host, timeout_s)
        return GlooEndpoint(port=open_rendezvous(timeout_s), **common)
