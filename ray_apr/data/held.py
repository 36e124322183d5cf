"""Small datasets whose blocks are there: read here, where a task of Ray Data may have to wait for
its process to start, for seconds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa
    import ray.data

_ROWS, _BYTES = 4096, 2**26
"""Most of a small one."""


def held_tables(dataset: ray.data.Dataset) -> list[pa.Table] | None:
    """The tables of a dataset that is there already and small; None: Ray Data has to read it.

    Waits for: the tables, from Ray's object store. Unblocked by: their coming, or their loss.

    Raises:
        Exception: What Ray or Arrow say of blocks that were lost, or are no tables.
    """
    import ray

    from ray_apr.compat.ray import MaterializedDataset

    if not isinstance(dataset, MaterializedDataset):
        return None
    if dataset.count() > _ROWS or dataset.size_bytes() > _BYTES:
        return None
    tables: list[pa.Table] = ray.get(dataset.to_arrow_refs())
    return tables


def first_row(dataset: ray.data.Dataset) -> dict[str, Any] | None:
    """The first row of a dataset; None: it has none.

    Waits for: Ray Data, where it has to read. Unblocked by: the row, or its error.
    """
    tables = held_tables(dataset)
    if tables is None:
        return next(iter(dataset.take(1)), None)
    return next((row for table in tables for row in table.slice(0, 1).to_pylist()), None)
