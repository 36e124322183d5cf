"""Values in Ray's object store, which may be full.

Ray moves objects that nobody reads to the disk, and puts new ones there where that does not help,
for which it waits some seconds. Only where that disk is full, too, there is no room.
"""

from __future__ import annotations

from typing import Any

import ray
from ray.exceptions import ObjectStoreFullError, OutOfDiskError, RayError

from ray_apr.core.exceptions import ResourceError, one_line


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
