"""Values on their way through actors: in Ray's object store, which may be full, or in the call.

Ray moves objects that nobody reads to the disk, and puts new ones there where that does not help,
for which it waits some seconds. Only where that disk is full, too, there is no room.

An object that another process keeps beyond the call leaves 390 bytes with Ray (2.60) in the one
that put it, and takes four times as long as a call that has the value (docs/failures.md).
So small values go along with the call (`carry`), and whoever keeps them has their bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
import ray.cloudpickle
from ray.exceptions import ObjectStoreFullError, OutOfDiskError, RayError

from ray_apr.core.exceptions import ResourceError, one_line

MOST_CARRIED = 64 << 10
"""Bytes of a value that goes along; Ray sends arguments of up to 100 KiB with the call itself."""


def carry(value: Any) -> Any:
    """What goes to another process in the place of a value: its bytes if they are few, else a
    reference to them, which has to be in a list, so that Ray does not resolve it.

    Raises:
        ResourceError: If there is no room.
    """
    data = ray.cloudpickle.dumps(value)
    return data if len(data) <= MOST_CARRIED else put(data)


def opened(carried: Sequence[Any], *, timeout_s: float | None = None) -> list[Any]:
    """The values of what `carry` gave.

    Waits for: those in the object store. Unblocked by: the store, the error of what it has lost, or
    the limit.
    """
    refs = [value for value in carried if not isinstance(value, bytes)]
    found = iter(ray.get(refs, timeout=timeout_s) if refs else ())
    data = (value if isinstance(value, bytes) else next(found) for value in carried)
    return [ray.cloudpickle.loads(value) for value in data]


def put(value: Any) -> Any:
    """Put a value into the store of this node; returns its reference.

    Raises:
        ResourceError: If there is no room.
    """
    try:
        return ray.put(value)
    except (ObjectStoreFullError, OutOfDiskError) as error:
        raise of_full_store(error) from error


def of_full_store(error: RayError) -> ResourceError:
    """The error of a store without room, with what helps."""
    return ResourceError(
        "Ray's object store is full, and so is the disk that takes what does not fit: make room "
        "where Ray has its temporary folder (ray start --temp-dir, /tmp/ray), or start Ray with "
        "more object_store_memory, then go on with the run (--resume). Ray says: "
        f"{one_line(error)}"
    )
