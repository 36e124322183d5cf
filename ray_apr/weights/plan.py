"""How a model's parameters lie in the buckets of a weight broadcast. Pure: neither torch nor ray.

Invariants:
    * Sender and receiver compute the plan from the same list, so nothing but bytes is broadcast.
    * Every parameter lies whole in one bucket, at an aligned offset; a bucket exceeds
      `bucket_bytes` only when a single parameter does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ray_apr.core.exceptions import WeightSyncError

ALIGNMENT = 64
"""Offsets are multiples of this, in bytes: a cache line, and more than any data type needs."""

ITEM_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Data types that may cross the wire."""


def aligned(num_bytes: int) -> int:
    """Bytes that something of this size takes in a buffer, up to where the next one may begin."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One tensor of a checkpoint, by its name there, as it crosses the wire."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        """Size on the wire."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Slice:
    """Where one parameter lies: `offset` bytes after the start of its bucket."""

    param: ParamSpec
    offset: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """What one broadcast carries."""

    slices: tuple[Slice, ...]
    num_bytes: int
    offset: int
    """Start of the bucket when all buckets lie in one buffer."""


def plan_buckets(params: Sequence[ParamSpec], bucket_bytes: int) -> tuple[Bucket, ...]:
    """Pack parameters into buckets, in their order.

    Args:
        params: What is sent; order matters, names must differ.
        bucket_bytes: Size of a bucket; a larger parameter gets one of its own.

    Raises:
        WeightSyncError: If a name comes twice or a data type is unknown.

    Example:
        >>> plan = plan_buckets([ParamSpec("a", (4,), "float32")], 1024)
        >>> [(b.num_bytes, [s.param.name for s in b.slices]) for b in plan]
        [(64, ['a'])]
    """
    _check(params)
    buckets: list[Bucket] = []
    slices: list[Slice] = []
    used = start = 0
    for param in params:
        if slices and used + param.num_bytes > bucket_bytes:
            buckets.append(Bucket(tuple(slices), used, start))
            start, slices, used = start + used, [], 0
        slices.append(Slice(param, used))
        used += aligned(param.num_bytes)
    if slices:
        buckets.append(Bucket(tuple(slices), used, start))
    return tuple(buckets)


def _check(params: Iterable[ParamSpec]) -> None:
    seen: set[str] = set()
    for param in params:
        if param.name in seen:
            raise WeightSyncError(
                f"parameter {param.name} would be sent twice; send tied ones once"
            )
        if param.dtype not in ITEM_BYTES:
            raise WeightSyncError(
                f"parameter {param.name} has data type {param.dtype}; "
                f"send one of {', '.join(ITEM_BYTES)}"
            )
        seen.add(param.name)
