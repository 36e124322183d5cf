"""Memory of the host that other processes of it may read."""

from __future__ import annotations

import mmap
import os

import numpy as np
import torch


class HostMemory:
    """So many bytes, without a name that outlives their processes.

    Args:
        size: In bytes; none are taken for 0.
        path: Of memory that is there; None: it is new.

    Raises:
        MemoryError: If this host never has so much.
        OSError: If what is at the path is gone.
    """

    def __init__(self, size: int, path: str | None = None) -> None:
        self.size = size
        self.bytes: np.ndarray = np.empty(0, np.uint8)
        if size > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
            raise MemoryError(f"{size} bytes are more than this host has")
        self._file = os.memfd_create("apr-state") if path is None else os.open(path, os.O_RDWR)
        try:
            if path is None:
                os.ftruncate(self._file, size)
            if size:
                self.bytes = np.frombuffer(mmap.mmap(self._file, size), np.uint8)
        except BaseException:
            os.close(self._file)
            raise

    @property
    def path(self) -> str:
        """Where other processes find it, until it is closed here."""
        return f"/proc/{os.getpid()}/fd/{self._file}"

    @property
    def address(self) -> int:
        """Of its first byte."""
        return int(self.bytes.ctypes.data)

    def is_at(self, path: str) -> bool:
        """Whether the memory at a path is this."""
        return os.path.samestat(os.fstat(self._file), os.stat(path))

    def tensor(self, begin: int, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """A tensor at a place of it, with a storage of its own."""
        count = shape.numel()
        if not count:
            return torch.empty(shape, dtype=dtype)
        memory: object = self.bytes
        return torch.frombuffer(memory, dtype=dtype, count=count, offset=begin).view(shape)

    def close(self) -> None:
        """Give it back, once no tensor is in it any more; nothing, if that is done."""
        if self._file >= 0:
            os.close(self._file)
        self._file, self.bytes = -1, np.empty(0, np.uint8)
