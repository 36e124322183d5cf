"""Collective groups that live beside torch.distributed's default group.

Ray's own GLOO backend needs that default group, which belongs to FSDP in a train worker and to vLLM
in an engine worker. ``APR_GLOO`` has a store and a Gloo process group of its own; ``APR_NCCL`` is
Ray's NCCL group with a rendezvous that holds for members on different device indices.

Members inside a Ray actor use plain `ray.util.collective` calls after `register_backends`. vLLM's
CPU worker is no Ray actor, which those calls demand; `join` gives it the group object itself.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import logging
import socket
import time
from typing import Any

import torch
import torch.distributed as dist
from ray.util.collective import types
from ray.util.collective.backend_registry import register_collective_backend
from ray.util.collective.collective import is_backend_available
from ray.util.collective.collective_group.base_collective_group import BaseGroup

from ray_apr.exceptions import WeightSyncError
from ray_apr.weights.plan import WeightGroup

logger = logging.getLogger(__name__)

GLOO = "APR_GLOO"
NCCL = "APR_NCCL"

_POLL_S = 0.0001

_REDUCE = {
    types.ReduceOp.SUM: dist.ReduceOp.SUM,
    types.ReduceOp.PRODUCT: dist.ReduceOp.PRODUCT,
    types.ReduceOp.MIN: dist.ReduceOp.MIN,
    types.ReduceOp.MAX: dist.ReduceOp.MAX,
}

_hosted: dict[int, dist.TCPStore] = {}
"""Stores that this process opened as rank 0, by port, until their group is joined."""


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


def address(group: WeightGroup) -> str:
    """Name of a group in ray.util.collective, which carries where its members meet."""
    return f"{group.group_name}|{group.host}|{group.port}|{group.timeout_s}"


class GlooGroup(BaseGroup):
    """A Gloo group with its own store, for tensors in host memory.

    Args:
        world_size: Number of members.
        rank: Rank of this member.
        group_name: What `address` returned: name, host, port and time limit.
    """

    def __init__(self, world_size: int, rank: int, group_name: str) -> None:
        super().__init__(world_size, rank, group_name)
        name, host, port, timeout_s = group_name.rsplit("|", 3)
        timeout = datetime.timedelta(seconds=float(timeout_s))
        store = _hosted.pop(int(port), None) if rank == 0 else None
        if store is None:
            store = dist.TCPStore(host, int(port), is_master=False, timeout=timeout)
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timeout
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=_own_address(host))]
        prefixed = dist.PrefixStore(name, store)
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


def register_backends() -> None:
    """Make the backends known to ray.util.collective in this process; harmless when repeated."""
    _register(GLOO, GlooGroup)
    try:
        from ray.util.collective.collective_group.nccl_collective_group import NCCLGroup
    except ImportError:
        return

    class IndexFreeNCCLGroup(NCCLGroup):  # type: ignore[misc]
        """Ray's NCCL group; members may sit on different device indices."""

        _dev_comm_map: dict[str, list[Any]]
        _dev_streams_map: dict[str, list[Any]]

        def _generate_group_key(self, comm_key: str) -> str:
            del comm_key  # the stock key holds the device index, which differs among the members
            return f"apr@{self.group_name}"

        @property
        def stream(self) -> torch.cuda.Stream:
            """Where the collectives run; it exists from the first one on."""
            ((stream,),) = self._dev_streams_map.values()
            return torch.cuda.ExternalStream(stream.ptr)

        def wait(self, deadline: float) -> None:
            """Wait until what was asked for is done; leave the group if it takes too long.

            Args:
                deadline: Limit, on the clock of `time.monotonic`.

            Raises:
                RuntimeError: If it has passed: a peer is dead or silent.
            """
            done = self.stream.record_event()
            while not done.query():
                if time.monotonic() > deadline:
                    self.destroy_group()
                    raise RuntimeError("a peer did not take part in time")
                time.sleep(_POLL_S)

        def destroy_group(self) -> None:
            """Leave at once: destroying a communicator waits until its peers do so, too."""
            communicators, self._dev_comm_map = self._dev_comm_map, {}
            for communicator in itertools.chain.from_iterable(communicators.values()):
                communicator.abort()
            self._dev_streams_map = {}

        def end_rendezvous(self) -> None:
            """Take away the detached actor at which the members have met; nobody needs it now."""
            with contextlib.suppress(ValueError):  # it is gone
                self._destroy_store(self._generate_group_key(""))

    _register(NCCL, IndexFreeNCCLGroup)


def _register(name: str, group_cls: type[BaseGroup]) -> None:
    try:
        register_collective_backend(name, group_cls)
    except ValueError:
        logger.debug("collective backend %s is registered already", name)


def join(group: WeightGroup, rank: int) -> BaseGroup:
    """Join outside of `ray.util.collective`; waits for all members.

    Raises:
        WeightSyncError: If the backend is missing or the members do not meet in time.
    """
    register_backends()
    if not is_backend_available(group.backend):
        raise WeightSyncError(f"collective backend {group.backend} is not available here")
    from ray.util.collective.backend_registry import _global_registry

    try:
        joined: BaseGroup = _global_registry.get(group.backend)(
            group.world_size, rank, address(group)
        )
        meet(joined, group)
        return joined
    except (RuntimeError, ValueError, OSError) as error:
        raise WeightSyncError(
            f"rank {rank} of {group.world_size} could not join the weight group at "
            f"{group.host}:{group.port} within {group.timeout_s:g} s: {error}"
        ) from error


def meet(joined: Any, group: WeightGroup) -> None:
    """Broadcast a byte: NCCL's members meet and connect at the first call, which takes seconds.

    Raises:
        RuntimeError: If the members do not meet in time.
    """
    if group.backend != NCCL:
        return
    deadline = time.monotonic() + group.timeout_s
    options = types.BroadcastOptions()
    options.root_rank, options.root_tensor = 0, 0
    joined.broadcast([byte_buffer(1, "cuda")], options)
    joined.wait(deadline)
    if joined.rank == 0:
        joined.end_rendezvous()


def byte_buffer(num_bytes: int, device: torch.device | str) -> torch.Tensor:
    """Flat, uninitialised buffer of bytes for buckets."""
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)


def as_tensor(
    buffer: torch.Tensor, offset: int, shape: tuple[int, ...], dtype: str
) -> torch.Tensor:
    """View of one parameter inside a byte buffer."""
    kind: torch.dtype = getattr(torch, dtype)
    end = offset + torch.Size(shape).numel() * kind.itemsize
    return buffer[offset:end].view(kind).view(shape)
