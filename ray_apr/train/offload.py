"""A train worker's memory on the host, while the engines have its device.

Invariants, kept by `Offload`:
    * Weights and optimizer states come back bit for bit, where they were: tensors and views of them
      stay the same objects, only their memory goes.
    * Between `to_host` and `to_device` nobody reads them.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from ray_apr.train.fsdp import drop_gathered
from ray_apr.train.tensors import local_tensor


class Offload:
    """Moves what a train worker keeps between two steps.

    Args:
        models: The model, and a frozen one beside it if there is one; FSDP2 or plain.
        optimizer: Of the first.
    """

    def __init__(self, models: list[nn.Module], optimizer: torch.optim.Optimizer) -> None:
        self._models = models
        self._optimizer = optimizer
        self._moved: list[tuple[torch.UntypedStorage, torch.Tensor]] = []
        self._hosts: dict[tuple[int, int], torch.Tensor] = {}
        """Pinned memory, by size and number: to allocate it takes longer than to copy."""

    def to_host(self) -> None:
        """Free the device's memory; nothing to do where it is free."""
        if self._moved:
            return
        for model in self._models:
            drop_gathered(model)
        counts: dict[int, int] = {}
        for storage in self._storages():
            size = storage.nbytes()
            number = counts[size] = counts.get(size, 0) + 1
            host = self._hosts.get((size, number))
            if host is None:
                pinned = storage.device.type == "cuda"
                host = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
                self._hosts[size, number] = host
            host.copy_(_bytes_of(storage), non_blocking=True)
            self._moved.append((storage, host))
        self._synchronize()
        for storage, _ in self._moved:
            storage.resize_(0)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def to_device(self) -> None:
        """Bring everything back; nothing to do where it is there."""
        for storage, host in self._moved:
            storage.resize_(host.numel())
            _bytes_of(storage).copy_(host, non_blocking=True)
        self._synchronize()
        self._moved = []

    def _storages(self) -> Iterator[torch.UntypedStorage]:
        """Memory of weights and states, once each; on CPU, files of weights are no memory."""
        seen: set[int] = set()
        states = (value for state in self._optimizer.state.values() for value in state.values())
        for model in self._models:
            for tensor in (*model.parameters(), *states):
                if not isinstance(tensor, torch.Tensor):
                    continue
                storage = local_tensor(tensor).untyped_storage()
                is_memory = storage.nbytes() and storage.resizable()
                if is_memory and storage.data_ptr() not in seen:
                    seen.add(storage.data_ptr())
                    yield storage

    def _synchronize(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """All of a storage, as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
