"""Columns of prompts have values of one kind each; numbers are one kind."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Sequence

import pyarrow as pa

from ray_apr.core.exceptions import ConfigError

_PROMOTES = "permissive"
"""Whole numbers become such with a point where a table has those, as they do inside of a table."""
_UNLIKE = re.compile(r"(?:Unable to merge: )?Field (.+?) has incompatible types: ([^\\\n]+)")


@contextlib.contextmanager
def of_one_kind() -> Iterator[None]:
    """Have an error of Arrow or Ray Data about a column with several kinds of values be one of
    ours, without their tracebacks; others stay as they are.

    Raises:
        ConfigError: Names the column and its kinds.
    """
    try:
        yield
    except Exception as error:
        found = _UNLIKE.search(str(error))
        if found is None:
            raise
        remedy = (
            "a column has one kind of value in all rows: text, numbers, true and false, lists or "
            "objects; make its values alike, or leave the column out (Dataset.drop_columns)"
        )
        raise ConfigError(f"prompts[*].{found[1]}", found[2].strip(), remedy) from None


def schema_of_all(schemas: Sequence[pa.Schema]) -> pa.Schema:
    """What the schemas of all tables can be promoted to.

    Raises:
        ConfigError: If a column has several kinds of values.
    """
    with of_one_kind():
        return pa.unify_schemas(schemas, promote_options=_PROMOTES)


def one_table(tables: Iterable[pa.Table]) -> pa.Table:
    """All rows of some tables.

    Raises:
        pa.ArrowInvalid, pa.ArrowTypeError: If a column has several kinds of values.
    """
    return pa.concat_tables(tables, promote_options=_PROMOTES)
