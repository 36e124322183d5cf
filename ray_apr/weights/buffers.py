"""Flat buffers of weights, and the tensors that lie in them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ray_apr.weights.plan import Bucket

Place = tuple[int, int, str]
"""Of a flat tensor in a byte buffer: bytes before it, elements, and data type."""

_NUM_STAGES = 3
"""Staging buffers on a GPU: while one is loaded, two arrive."""


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


def flat_views(buffer: torch.Tensor, places: Sequence[Place]) -> Sequence[torch.Tensor]:
    """Flat views of tensors that lie one after the other in a buffer, whose length is a multiple of
    `plan.ALIGNMENT`; of one data type, as they mostly are, all are made in one call."""
    dtypes = {dtype for *_, dtype in places}
    if len(dtypes) != 1:
        return [as_tensor(buffer, offset, (count,), dtype) for offset, count, dtype in places]
    kind: torch.dtype = getattr(torch, dtypes.pop())
    sizes, end = [], 0
    for offset, count, _ in places:
        begin = offset // kind.itemsize
        sizes += [begin - end, count]
        end = begin + count
    whole = buffer.view(kind)
    return whole.split([*sizes, whole.numel() - end])[1::2]


def named_views(bucket: Bucket, buffer: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """A bucket's tensors inside its buffer, by name."""
    return [
        (s.param.name, as_tensor(buffer, s.offset, s.param.shape, s.param.dtype))
        for s in bucket.slices
    ]


class Stages:
    """A few buffers that buckets go through in turns; a bucket has the same one in each sync.

    Args:
        buckets: Of one sync.
        device: A GPU.
    """

    def __init__(self, buckets: Sequence[Bucket], device: torch.device) -> None:
        self._sizes = [bucket.num_bytes for bucket in buckets]
        longest = [max(self._sizes[stage::_NUM_STAGES], default=0) for stage in range(_NUM_STAGES)]
        self._buffers = [byte_buffer(size, device) for size in longest]

    def __len__(self) -> int:
        return _NUM_STAGES

    def of(self, number: int) -> torch.Tensor:
        """Where a bucket is staged."""
        return self._buffers[number % _NUM_STAGES][: self._sizes[number]]
