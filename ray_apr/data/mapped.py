"""Tables in a file that is mapped into memory: the kernel holds of it what is read and fits."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable

import pyarrow as pa

from ray_apr.core.exceptions import ResourceError
from ray_apr.data.kinds import one_table


def mapped_table(schema: pa.Schema, tables: Iterable[pa.Table]) -> pa.Table:
    """Tables as one, whose columns are in a temporary file; those of dictionaries hold the values.

    The file has no name once this returns: it goes with the process, whatever ends that.

    Args:
        schema: That all tables can be promoted to.
        tables: In their order; one after the other is in memory.

    Raises:
        ResourceError: If the folder for temporary files (``TMPDIR``) has no room.
    """
    schema = _without_dictionaries(schema)
    empty = schema.empty_table()
    try:
        with tempfile.NamedTemporaryFile(prefix="ray_apr-", suffix=".arrow") as file:
            with pa.ipc.new_file(file, schema) as writer:
                for table in tables:
                    plain = table.cast(_without_dictionaries(table.schema))
                    writer.write_table(one_table([empty, plain]))
            file.flush()
            return pa.ipc.open_file(pa.memory_map(file.name)).read_all()
    except OSError as error:
        raise ResourceError(
            f"{tempfile.gettempdir()} does not take the prompts: {error}; make room there, or "
            "set TMPDIR to a folder of another disk"
        ) from error


def _without_dictionaries(schema: pa.Schema) -> pa.Schema:
    """A file takes one dictionary for each column, and each table may have another."""
    return pa.schema([_plain(field) for field in schema], schema.metadata)


def _plain(field: pa.Field) -> pa.Field:
    kind, types = field.type, pa.types
    if types.is_dictionary(kind):
        return _plain(field.with_type(kind.value_type))
    if types.is_struct(kind):
        return field.with_type(pa.struct([_plain(kind.field(i)) for i in range(kind.num_fields)]))
    if types.is_list(kind):
        return field.with_type(pa.list_(_plain(kind.value_field)))
    if types.is_large_list(kind):
        return field.with_type(pa.large_list(_plain(kind.value_field)))
    return field
