"""Weights that are broadcast between GPUs, by a group of Ray's NCCL.

Buckets go through a few staging buffers of the receiver: while one is loaded, two arrive.
"""

from __future__ import annotations

import functools
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ray_apr.core.exceptions import WeightSyncError
from ray_apr.weights.buffers import Stages, byte_buffer
from ray_apr.weights.collective import from_rank_0, join, register, wait_for_members
from ray_apr.weights.plan import Bucket
from ray_apr.weights.transports.base import NEEDS_CUPY, BucketParcel, Member, Parcel
from ray_apr.weights.transports.group import GroupEndpoint, GroupSender

NCCL = "APR_NCCL"

_POLL_S = 0.0001


def new_nccl_id() -> str:
    """Make the id of a new NCCL group, in hexadecimal; its rank 0 does so, and tells the others.

    Raises:
        WeightSyncError: If CuPy is missing or too old, by which Ray calls NCCL.
    """
    try:
        from ray_apr.compat.ray import get_nccl_unique_id

        nccl_id = get_nccl_unique_id()
    except (ImportError, RuntimeError) as error:
        raise WeightSyncError(
            f"weights travel between GPUs by NCCL through CuPy: {error}; {NEEDS_CUPY}"
        ) from error
    if not isinstance(nccl_id, bytes):
        raise WeightSyncError(f"this CuPy has NCCL's ids as {type(nccl_id).__name__}; {NEEDS_CUPY}")
    return nccl_id.hex()


@functools.cache
def _group_cls() -> Any:
    """Ray's NCCL group, as its members are told NCCL's id.

    Raises:
        ImportError: If CuPy is missing.
    """
    import cupy

    from ray_apr.compat.ray import NCCLGroup, create_nccl_communicator, get_stream_pool

    class ToldNCCLGroup(NCCLGroup):  # type: ignore[misc]
        """Ray's NCCL group, whose members have its id from `NCCLEndpoint.address`.

        Ray's own ask a detached actor for it, every second, by the index of their device: only
        members with the same index find each other, and the actor outlives whoever is killed.

        Waits for: the lock of its communicators. Unblocked by: who holds it, for assignments alone.
        """

        _dev_comm_map: dict[str, list[Any]]
        _dev_streams_map: dict[str, list[Any]]

        def __init__(self, world_size: int, rank: int, group_name: str) -> None:
            super().__init__(world_size, rank, group_name)
            self._nccl_id = bytes.fromhex(group_name.rpartition("|")[2])
            self._has_left = False
            self._leaving = threading.Lock()

        def _get_nccl_collective_communicator(
            self, comm_key: str, device_list: list[int]
        ) -> list[Any]:
            if comm_key in self._dev_comm_map:
                return self._dev_comm_map[comm_key]
            (device,) = device_list
            self._used_gpu_indices.add(device)
            with cupy.cuda.Device(device):
                communicator = create_nccl_communicator(self.world_size, self._nccl_id, self.rank)
                stream, event = get_stream_pool(device).get_stream(), cupy.cuda.Event()
            with self._leaving:
                if not self._has_left:
                    self._dev_streams_map[comm_key] = [stream]
                    self._dev_event_map[comm_key] = [event]
                    self._dev_comm_map[comm_key] = [communicator]
                    return self._dev_comm_map[comm_key]
            communicator.abort()
            raise RuntimeError("this member has left while the others came")

        @property
        def stream(self) -> torch.cuda.Stream:
            """Where the collectives run; it exists from the first one on."""
            ((stream,),) = self._dev_streams_map.values()
            return torch.cuda.ExternalStream(stream.ptr)

        def wait(self, deadline: float) -> None:
            """Wait until what was asked for is done; leave the group if it takes too long.

            Waits for: the peers. Unblocked by: their part, or `deadline`.

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
            with self._leaving:
                self._has_left = True
                communicators, self._dev_comm_map = self._dev_comm_map, {}
            for communicator in itertools.chain.from_iterable(communicators.values()):
                communicator.abort()
            self._dev_streams_map = {}

    return ToldNCCLGroup


def register_nccl() -> None:
    """Make the backend known in this process, where CuPy is installed. It takes a moment: best
    before engines stop for it."""
    try:
        register(NCCL, _group_cls())
    except ImportError:
        return


@dataclass(frozen=True, slots=True, kw_only=True)
class NCCLEndpoint(GroupEndpoint):
    """An NCCL group of the trainer and all engine workers."""

    backend: ClassVar[str] = NCCL

    nccl_id: str
    """NCCL's id of the group, in hexadecimal."""

    @property
    def address(self) -> str:
        """Name in ray.util.collective."""
        return f"{self.group_name}|{self.nccl_id}"

    def register(self) -> None:
        """Make the backend known in this process."""
        register_nccl()

    def meet(
        self, joined: Any, *, timeout_s: float, is_hopeless: Callable[[], bool] = lambda: False
    ) -> None:
        """Broadcast a byte: NCCL's members meet and connect at the first call, which takes a
        moment.

        In a thread of its own: NCCL waits without end for a member that has died before it came.

        Args:
            joined: The group, on this process's current device.
            timeout_s: Limit.
            is_hopeless: Says that a member will not come, while one waits for it.

        Raises:
            RuntimeError: If the members do not meet in time, or one will not come. The group is to
                be left then (`destroy_group`); a member that comes late does no harm.
        """
        deadline = time.monotonic() + timeout_s
        device, byte = torch.cuda.current_device(), byte_buffer(1, "cuda")

        def form() -> None:
            with torch.cuda.device(device):
                joined.broadcast([byte], from_rank_0())

        wait_for_members(form, timeout_s=timeout_s, is_hopeless=is_hopeless)
        joined.wait(deadline)

    def join(self, member: Member) -> NCCLReceiver:
        """Join the group; waits for all members."""
        joined = join(self, member.rank)
        buckets = self.buckets()
        stages = Stages(buckets, member.device)
        return NCCLReceiver(
            joined, buckets, stages, timeout_s=self.timeout_s, loads_wait=member.loads_wait
        )


class NCCLReceiver:
    """Receives each bucket while the two before are loaded.

    Args:
        joined: This member's end of the group.
        buckets: What arrives.
        stages: Where.
        timeout_s: Limit of all.
        loads_wait: Whether loading waits for the device, which would wait for a broadcast without
            end.
    """

    def __init__(
        self,
        joined: Any,
        buckets: tuple[Bucket, ...],
        stages: Stages,
        *,
        timeout_s: float,
        loads_wait: bool,
    ) -> None:
        self._joined = joined
        self._buckets = buckets
        self._stages = stages
        self._timeout_s = timeout_s
        self._loads_wait = loads_wait

    def receive(self, notice: Any) -> Iterator[Parcel]:
        """Give the buckets, to be loaded on the current stream, the same one for all of them.

        Raises:
            RuntimeError: If a peer is gone; the group is left then.
        """
        import cupy

        del notice
        deadline = time.monotonic() + self._timeout_s
        stream = torch.cuda.current_stream()
        arrived: list[torch.cuda.Event] = []

        def ask_for(number: int) -> None:
            # Ray's stream waits for CuPy's current one: here, until the staging buffer is free
            with cupy.cuda.ExternalStream(stream.cuda_stream, stream.device_index):
                self._joined.broadcast([self._stages.of(number)], from_rank_0())
            arrived.append(self._joined.stream.record_event(torch.cuda.Event()))

        for number in range(min(len(self._stages), len(self._buckets))):
            ask_for(number)
        for number, bucket in enumerate(self._buckets):
            if self._loads_wait:
                self._joined.wait(deadline)
            stream.wait_event(arrived[number])
            yield BucketParcel(bucket, self._stages.of(number), is_staged=True)
            if number + len(self._stages) < len(self._buckets):
                ask_for(number + len(self._stages))
        self._joined.wait(deadline)

    def close(self) -> None:
        """Leave the group at once; one that broke off would only hang."""
        self._joined.destroy_group()


class NCCLSender(GroupSender):
    """Sends from rank 0's GPU."""

    def __init__(self, weights: Any) -> None:
        super().__init__(weights)
        register_nccl()  # here: engines stop for what forming a group takes

    def open(self, num_engine_workers: int, *, host: str, timeout_s: float) -> NCCLEndpoint:
        """Describe a new group; `WeightSyncError` if CuPy is missing. See `WeightSender.open`."""
        common = self.common(num_engine_workers, host, timeout_s)
        return NCCLEndpoint(nccl_id=new_nccl_id(), **common)
