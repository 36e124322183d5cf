"""Weights for engines on the train workers' own devices: read where they were gathered.

    rank r: gather ─► buffers of its device ─handles─► rank 0 ─► the engine workers of each device

NCCL takes no two processes on one GPU. Here every rank gathers all weights, and the engine workers
of its device read its buffers: by CUDA IPC on a GPU, by a nameless file in memory on CPU. What
travels through the control path is a handle a bucket: numbers and bytes.

Invariants:
    * A handle is good until its owner's `SharedSender.release`, or its process's end; neither
      leaves anything behind.
    * A rank's buffers are there, and all of its work on them is done, before its handles leave.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ray_apr.core.exceptions import WeightSyncError
from ray_apr.weights.buffers import Stages
from ray_apr.weights.plan import Bucket, ParamSpec, plan_buckets
from ray_apr.weights.transports.base import (
    NEEDS_CUPY,
    BucketParcel,
    Member,
    Parcel,
    WeightSender,
)

Handle = list[Any]
"""What another process opens a buffer by: plain values, which any serializer takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedEndpoint:
    """What will be shared; nobody has to meet."""

    bucket_bytes: int
    params: tuple[ParamSpec, ...]

    def join(self, member: Member) -> SharedReceiver:
        """Make ready to read."""
        return SharedReceiver(plan_buckets(self.params, self.bucket_bytes), member.device)


class SharedReceiver:
    """Reads what the train worker on this device has gathered.

    Args:
        buckets: What is read.
        device: The one that is shared.
    """

    def __init__(self, buckets: tuple[Bucket, ...], device: torch.device) -> None:
        self._buckets = buckets
        self._device = device
        self._stages = None if device.type == "cpu" else Stages(buckets, device)

    def receive(self, notice: Mapping[str, list[Handle]]) -> Iterator[Parcel]:
        """Give the buckets: on CPU as they are shared, on a GPU by way of staging buffers, which
        stay where they are at each sync.

        Args:
            notice: Handles of each device's buffers, by `device_key`.

        Raises:
            WeightSyncError: If no train worker has this device.
        """
        key = device_key(self._device)
        if key not in notice:
            raise WeightSyncError(
                f"no train worker shares {key} with this engine worker; they are on "
                f"{', '.join(notice)}. Placement colocated needs a cluster with just as many free "
                "GPUs as train workers"
            )
        with contextlib.ExitStack() as stack:
            buffers = [stack.enter_context(opened(h, self._device)) for h in notice[key]]
            for number, (bucket, buffer) in enumerate(zip(self._buckets, buffers, strict=True)):
                if self._stages is None:
                    yield BucketParcel(bucket, buffer)
                else:
                    staged = self._stages.of(number).copy_(buffer)
                    yield BucketParcel(bucket, staged, is_staged=True)

    def close(self) -> None:
        """Nothing is held between two syncs."""


class SharedSender(WeightSender):
    """The end of a train worker that has an engine on its device; see `WeightSender`.

    `gather` gives every rank all weights, and rank 0 the handles of all ranks' buffers.
    """

    _handles: Mapping[str, list[Handle]]

    def __init__(self, weights: Any) -> None:
        super().__init__(weights)
        self._files: list[int] = []
        if weights.device.type == "cuda":
            try:
                import cupy  # noqa: F401  # seconds, which would else be a part of the first sync
            except ImportError as error:
                raise WeightSyncError(
                    f"weights are shared on a GPU through CuPy: {error}; {NEEDS_CUPY}"
                ) from error

    def open(self, num_engine_workers: int, *, host: str, timeout_s: float) -> SharedEndpoint:
        """Say what will be shared; see `WeightSender.open`."""
        del num_engine_workers, host, timeout_s
        return SharedEndpoint(bucket_bytes=self.weights.bucket_bytes, params=self.weights.params)

    def gather(self) -> None:
        """Copy the current weights to a buffer of every rank; see `WeightSender.gather`."""
        self.release()
        self.weights.gather(to_all=True, new_buffer=self._new_buffer)
        mine = {device_key(self.weights.device): self._make_handles()}
        if not dist.is_initialized():
            self._handles = mine
            return
        found: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(mine, found, dst=0, group=self.weights.ranks)
        self._handles = {key: buffers for rank in found or [] for key, buffers in rank.items()}

    def prepare(self) -> Mapping[str, list[Handle]]:
        """Handles of all ranks' buffers, one of each bucket, by `device_key` of the device."""
        self.check_gathered()
        return self._handles

    def release(self) -> None:
        """Free what was gathered, once rank 0 does so: a collective of all train workers."""
        if self.has_weights and dist.is_initialized():
            dist.barrier(self.weights.ranks)
        super().release()
        self._handles = {}
        for file in self._files:
            os.close(file)
        self._files = []

    def _new_buffer(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        if device.type == "cuda":
            return _shareable(num_bytes, device)
        file = os.memfd_create("apr-weights")
        self._files.append(file)
        os.ftruncate(file, num_bytes)
        return torch.from_file(_path(os.getpid(), file), True, num_bytes, dtype=torch.uint8)

    def _make_handles(self) -> list[Handle]:
        staged = self.weights.staged
        if self.weights.device.type == "cuda":
            from cupy.cuda import runtime

            return [[runtime.ipcGetMemHandle(b.data_ptr()), b.numel()] for b in staged]
        sizes = [buffer.numel() for buffer in staged]
        return [[os.getpid(), file, size] for file, size in zip(self._files, sizes, strict=True)]


def device_key(device: torch.device) -> str:
    """Name of a device that all processes on its host give it, whatever number it has for them."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_properties(device).uuid)
    return f"cpu of {socket.gethostname()}"


@contextlib.contextmanager
def opened(handle: Handle, device: torch.device) -> Iterator[torch.Tensor]:
    """The bytes that a `SharedSender` on this device shares, without a copy.

    On CUDA they are there until the block ends, which waits for what the device still does.

    Raises:
        OSError: If the sender has released them, on CPU.
        cupy.cuda.runtime.CUDARuntimeError: If it has, on CUDA.
    """
    if device.type != "cuda":
        process, file, size = handle
        yield torch.from_file(_path(process, file), True, size, dtype=torch.uint8)
        return
    from cupy.cuda import Device, UnownedMemory, runtime

    memory, size = handle
    with Device(device.index):
        address = runtime.ipcOpenMemHandle(memory)
        try:
            yield _as_tensor(UnownedMemory(address, size, None), size, device)
        finally:
            torch.cuda.synchronize(device)
            runtime.ipcCloseMemHandle(address)


def _shareable(num_bytes: int, device: torch.device) -> torch.Tensor:
    """A buffer that is an allocation of its own: of PyTorch's, another process would get the whole
    block, and PyTorch would keep it until as many readers as there were handles have closed it."""
    from cupy.cuda import Device, Memory, runtime

    with Device(device.index):
        try:
            memory = Memory(num_bytes)
        except runtime.CUDARuntimeError:  # what PyTorch keeps for later may be in the way
            torch.cuda.empty_cache()
            memory = Memory(num_bytes)
        return _as_tensor(memory, num_bytes, device)


def _as_tensor(memory: Any, num_bytes: int, device: torch.device) -> torch.Tensor:
    """CuPy's memory as a tensor, which keeps it."""
    import cupy

    array = cupy.ndarray((num_bytes,), cupy.uint8, cupy.cuda.MemoryPointer(memory, 0))
    return torch.as_tensor(array, device=device)


def _path(process: int, file: int) -> str:
    """Where other processes find a file that has no name."""
    return f"/proc/{process}/fd/{file}"
