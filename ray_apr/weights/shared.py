"""Weights for engines on the train workers' own devices: read where they were gathered.

    rank r: gather ─► buffers of its device ─handles─► rank 0 ─► the engine workers of each device

NCCL takes no two processes on one GPU. Here every rank gathers all weights, and the engine workers
of its device read its buffers: by CUDA IPC on a GPU, by a nameless file in memory on CPU. What
travels through the control path is a handle a bucket: numbers and bytes.

Invariants:
    * A handle is good until its owner's `SharedWeightSender.release`, or its process's end; neither
      leaves anything behind.
    * A rank's buffers are there, and all of its work on them is done, before its handles leave.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from ray_apr.exceptions import WeightSyncError
from ray_apr.weights.plan import WeightGroup
from ray_apr.weights.sender import WeightSender

SHARED = "SHARED"
"""Backend of a weight group whose members share devices; ray.util.collective has no part in it."""

Handle = list[Any]
"""What another process opens a buffer by: plain values, which any serializer takes."""


class SharedWeightSender(WeightSender):
    """The end of a train worker that has its device in turns with the engines; see `WeightSender`.

    Args:
        model: The train worker's model, FSDP2 or plain; a Hugging Face model.
        bucket_mb: Size of one buffer, in MiB.
        wire_dtype: Data type on the wire; None sends each parameter as it is.
        group: Group of all train workers that waits without their devices; None: the default one.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        bucket_mb: float,
        wire_dtype: str | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(model, bucket_mb=bucket_mb, wire_dtype=wire_dtype, to_all=True)
        self._ranks = group
        self._files: list[int] = []
        self.handles: Mapping[str, list[Handle]] = {}

    def open_group(self, num_engine_workers: int, *, host: str, timeout_s: float) -> WeightGroup:
        """Say what will be shared; nobody has to meet."""
        return self._describe_group(num_engine_workers, host, 0, SHARED, timeout_s)

    def connect(self, group: WeightGroup, is_hopeless: Callable[[], bool] = lambda: False) -> None:
        """Nothing to join."""
        del group, is_hopeless

    def gather(self) -> None:
        """Copy the current weights to a buffer of every rank; a collective of all train workers.

        Rank 0 has `handles` afterwards: one of each bucket, by `device_key` of the rank's device.
        """
        super().gather()
        mine = {device_key(self._device): self._make_handles()}
        if not dist.is_initialized():
            self.handles = mine
            return
        found: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(mine, found, dst=0, group=self._ranks)
        self.handles = {key: buffers for rank in found or [] for key, buffers in rank.items()}

    def send(self) -> None:
        """Nothing leaves: the engines read.

        Raises:
            WeightSyncError: If nothing was gathered.
        """
        if not self.staged:
            raise WeightSyncError("gather() comes before send()")

    def release(self) -> None:
        """Free what was gathered, once rank 0 does so: a collective of all train workers."""
        if self.staged and dist.is_initialized():
            dist.barrier(self._ranks)
        super().release()
        self.handles = {}
        for file in self._files:
            os.close(file)
        self._files = []

    def close(self) -> None:
        """Free what was gathered."""
        self.release()

    def _new_buffer(self, num_bytes: int) -> torch.Tensor:
        if self._device.type == "cuda":
            return _shareable(num_bytes, self._device)
        file = os.memfd_create("apr-weights")
        self._files.append(file)
        os.ftruncate(file, num_bytes)
        return torch.from_file(_path(os.getpid(), file), True, num_bytes, dtype=torch.uint8)

    def _make_handles(self) -> list[Handle]:
        if self._device.type == "cuda":
            from cupy.cuda import runtime

            return [[runtime.ipcGetMemHandle(b.data_ptr()), b.numel()] for b in self.staged]
        sizes = [buffer.numel() for buffer in self.staged]
        return [[os.getpid(), file, size] for file, size in zip(self._files, sizes, strict=True)]


def device_key(device: torch.device) -> str:
    """Name of a device that all processes on its host give it, whatever number it has for them."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_properties(device).uuid)
    return f"cpu of {socket.gethostname()}"


@contextlib.contextmanager
def opened(handle: Handle, device: torch.device) -> Iterator[torch.Tensor]:
    """The bytes that a `SharedWeightSender` on this device shares, without a copy.

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
    from cupy.cuda import Device, Memory

    with Device(device.index):
        return _as_tensor(Memory(num_bytes), num_bytes, device)


def _as_tensor(memory: Any, num_bytes: int, device: torch.device) -> torch.Tensor:
    """CuPy's memory as a tensor, which keeps it."""
    import cupy

    array = cupy.ndarray((num_bytes,), cupy.uint8, cupy.cuda.MemoryPointer(memory, 0))
    return torch.as_tensor(array, device=device)


def _path(process: int, file: int) -> str:
    """Where other processes find a file that has no name."""
    return f"/proc/{process}/fd/{file}"
