"""Collective groups that live beside torch.distributed's default group.

Ray's own GLOO backend needs that default group, which belongs to FSDP in a train worker and to vLLM
in an engine worker. ``APR_GLOO`` has its own (`weights.gloo`); ``APR_NCCL`` is Ray's NCCL group of
members that were told NCCL's id of it.

Members inside a Ray actor use plain `ray.util.collective` calls after `register_backends`. vLLM's
CPU worker is no Ray actor, which those calls demand; `join` gives it the group object itself.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from ray.util.collective import types

from ray_apr.exceptions import SYNC_BROKEN, SyncBrokenError, WeightSyncError
from ray_apr.ray_private import (
    BaseGroup,
    collective_backend,
    is_backend_available,
    register_collective_backend,
)
from ray_apr.weights.gloo import GlooGroup
from ray_apr.weights.plan import WeightGroup

logger = logging.getLogger(__name__)

NCCL = "APR_NCCL"

_POLL_S = 0.0001
_MEETING_POLL_S = 0.05


def new_nccl_id() -> str:
    """Make the id of a new NCCL group, in hexadecimal; its rank 0 does so, and tells the others.

    Raises:
        WeightSyncError: If CuPy is missing or too old, by which Ray calls NCCL.
    """
    remedy = "install ray_apr[gpu], or CuPy 14 or later for your CUDA"
    try:
        from ray_apr.ray_private import get_nccl_unique_id

        nccl_id = get_nccl_unique_id()
    except (ImportError, RuntimeError) as error:
        raise WeightSyncError(
            f"weights travel between GPUs by NCCL through CuPy: {error}; {remedy}"
        ) from error
    if not isinstance(nccl_id, bytes):
        raise WeightSyncError(f"this CuPy has NCCL's ids as {type(nccl_id).__name__}; {remedy}")
    return nccl_id.hex()


def address(group: WeightGroup) -> str:
    """Name of a group in ray.util.collective, which carries what its members need to meet."""
    if group.backend == NCCL:
        return f"{group.group_name}|{group.nccl_id}"
    return f"{group.group_name}|{group.host}|{group.port}|{group.timeout_s}"


def register_backends() -> None:
    """Make the backends known to ray.util.collective in this process; harmless when repeated."""
    _register(GlooGroup.backend(), GlooGroup)
    try:
        import cupy
    except ImportError:
        return
    from ray_apr.ray_private import NCCLGroup, create_nccl_communicator, get_stream_pool

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

    _register(NCCL, ToldNCCLGroup)


def _register(name: str, group_cls: type[BaseGroup]) -> None:
    try:
        register_collective_backend(name, group_cls)
    except ValueError:
        logger.debug("collective backend %s is registered already", name)


def join(group: WeightGroup, rank: int) -> BaseGroup:
    """Join outside of `ray.util.collective`; waits for all members.

    With NCCL it waits half as long as rank 0: who is free again meanwhile can join the group that
    rank 0 then forms without the one that has not come.

    Raises:
        SyncBrokenError: If the members do not meet in time.
        WeightSyncError: If the backend is missing.
    """
    register_backends()
    if not is_backend_available(group.backend):
        raise WeightSyncError(f"collective backend {group.backend} is not available here")
    joined: BaseGroup | None = None
    try:
        joined = collective_backend(group.backend)(group.world_size, rank, address(group))
        meet(joined, group, timeout_s=group.timeout_s / 2)
        return joined
    except (RuntimeError, ValueError, OSError) as error:
        if joined is not None:
            joined.destroy_group()
        raise SyncBrokenError(
            f"{SYNC_BROKEN}: rank {rank} of {group.world_size} could not join the weight group of "
            f"{group.host}{f':{group.port}' if group.port else ''}: {error}"
        ) from error


def meet(
    joined: Any,
    group: WeightGroup,
    *,
    timeout_s: float,
    is_hopeless: Callable[[], bool] = lambda: False,
) -> None:
    """Broadcast a byte: NCCL's members meet and connect at the first call, which takes a moment.

    In a thread of its own: NCCL waits without end for a member that has died before it came.

    Args:
        joined: The group, on this process's current device.
        group: What it is.
        timeout_s: Limit.
        is_hopeless: Says that a member will not come, while one waits for it.

    Raises:
        RuntimeError: If the members do not meet in time, or one will not come. The group is to be
            left then (`destroy_group`); a member that comes late does no harm.
    """
    if group.backend != NCCL:
        return
    deadline = time.monotonic() + timeout_s
    device, byte = torch.cuda.current_device(), byte_buffer(1, "cuda")

    def form() -> None:
        options = types.BroadcastOptions()
        options.root_rank, options.root_tensor = 0, 0
        with torch.cuda.device(device):
            joined.broadcast([byte], options)

    wait_for_members(form, timeout_s=timeout_s, is_hopeless=is_hopeless)
    joined.wait(deadline)


def wait_for_members(
    form: Callable[[], None], *, timeout_s: float, is_hopeless: Callable[[], bool]
) -> None:
    """Run what waits for all members, in a thread of its own.

    Args:
        form: Returns once they are there.
        timeout_s: Limit.
        is_hopeless: Says that a member will not come.

    Raises:
        RuntimeError: If it did not return in time, or is hopeless. It goes on by itself.
        Exception: What `form` raised.
    """
    deadline = time.monotonic() + timeout_s
    formed: concurrent.futures.Future[None] = concurrent.futures.Future()

    def run() -> None:
        """Waits for: all members. Unblocked by: them, or whoever closes their rendezvous, or the
        end of the process. Produces: the group, or an error."""
        try:
            form()
            formed.set_result(None)
        except BaseException as error:  # noqa: BLE001  (raised below)
            formed.set_exception(error)

    threading.Thread(target=run, name="form-weight-group", daemon=True).start()
    while not formed.done():
        if time.monotonic() > deadline:
            raise RuntimeError(f"a member did not come within {timeout_s:g} s")
        if is_hopeless():
            raise RuntimeError("a member will not come")
        concurrent.futures.wait([formed], timeout=_MEETING_POLL_S)
    formed.result()


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
