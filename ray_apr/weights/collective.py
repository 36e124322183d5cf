"""Collective groups that live beside torch.distributed's default group.

Ray's own GLOO backend needs that default group, which belongs to FSDP in a train worker and to vLLM
in an engine worker. ``APR_GLOO`` has a store and a Gloo process group of its own; ``APR_NCCL`` is
Ray's NCCL group of members that were told NCCL's id of it.

Members inside a Ray actor use plain `ray.util.collective` calls after `register_backends`. vLLM's
CPU worker is no Ray actor, which those calls demand; `join` gives it the group object itself.
"""

from __future__ import annotations

import concurrent.futures
import datetime
import itertools
import logging
import socket
import threading
import time
from collections.abc import Callable
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
_MEETING_POLL_S = 0.05

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


def new_nccl_id() -> str:
    """Make the id of a new NCCL group, in hexadecimal; its rank 0 does so, and tells the others.

    Raises:
        WeightSyncError: If CuPy is missing or too old, by which Ray calls NCCL.
    """
    remedy = "install ray_apr[gpu], or CuPy 14 or later for your CUDA"
    try:
        from ray.util.collective.collective_group.nccl_util import get_nccl_unique_id
    except ImportError as error:
        raise WeightSyncError(
            f"weights travel between GPUs by NCCL through CuPy: {error}; {remedy}"
        ) from error
    nccl_id = get_nccl_unique_id()
    if not isinstance(nccl_id, bytes):
        raise WeightSyncError(f"this CuPy has NCCL's ids as {type(nccl_id).__name__}; {remedy}")
    return nccl_id.hex()


def address(group: WeightGroup) -> str:
    """Name of a group in ray.util.collective, which carries what its members need to meet."""
    if group.backend == NCCL:
        return f"{group.group_name}|{group.nccl_id}"
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
        import cupy
        from ray.util.collective.collective_group import nccl_util
        from ray.util.collective.collective_group.cuda_stream import get_stream_pool
        from ray.util.collective.collective_group.nccl_collective_group import NCCLGroup
    except ImportError:
        return

    class ToldNCCLGroup(NCCLGroup):  # type: ignore[misc]
        """Ray's NCCL group, whose members have its id from what `address` returned.

        Ray's own ask a detached actor for it, every second, by the index of their device: only
        members with the same index find each other, and the actor outlives whoever is killed.
        """

        _dev_comm_map: dict[str, list[Any]]
        _dev_streams_map: dict[str, list[Any]]

        def __init__(self, world_size: int, rank: int, group_name: str) -> None:
            super().__init__(world_size, rank, group_name)
            self._nccl_id = bytes.fromhex(group_name.rpartition("|")[2])

        def _get_nccl_collective_communicator(
            self, comm_key: str, device_list: list[int]
        ) -> list[Any]:
            if comm_key not in self._dev_comm_map:
                (device,) = device_list
                with nccl_util.Device(device):
                    communicator = nccl_util.create_nccl_communicator(
                        self.world_size, self._nccl_id, self.rank
                    )
                    self._dev_streams_map[comm_key] = [get_stream_pool(device).get_stream()]
                    self._dev_event_map[comm_key] = [cupy.cuda.Event()]
                self._dev_comm_map[comm_key] = [communicator]
            return self._dev_comm_map[comm_key]

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

    _register(NCCL, ToldNCCLGroup)


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


def meet(joined: Any, group: WeightGroup, is_hopeless: Callable[[], bool] = lambda: False) -> None:
    """Broadcast a byte: NCCL's members meet and connect at the first call, which takes a moment.

    In a thread of its own: NCCL waits without end for a member that has died before it came.

    Args:
        joined: The group, on this process's current device.
        group: What it is.
        is_hopeless: Says that a member will not come, while one waits for it.

    Raises:
        RuntimeError: If the members do not meet in time, or one will not come.
    """
    if group.backend != NCCL:
        return
    deadline = time.monotonic() + group.timeout_s
    device, byte = torch.cuda.current_device(), byte_buffer(1, "cuda")
    formed: concurrent.futures.Future[None] = concurrent.futures.Future()

    def form() -> None:
        """Waits for: all members. Unblocked by: them, or the end of the process."""
        options = types.BroadcastOptions()
        options.root_rank, options.root_tensor = 0, 0
        try:
            with torch.cuda.device(device):
                joined.broadcast([byte], options)
            formed.set_result(None)
        except BaseException as error:  # noqa: BLE001  (raised below)
            formed.set_exception(error)

    threading.Thread(target=form, name="form-weight-group", daemon=True).start()
    while not formed.done():
        if time.monotonic() > deadline:
            raise RuntimeError("a member did not come in time")
        if is_hopeless():
            raise RuntimeError("a member will not come")
        concurrent.futures.wait([formed], timeout=_MEETING_POLL_S)
    formed.result()
    joined.wait(deadline)


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
