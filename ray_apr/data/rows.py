"""Prompts that this process holds: looked at without Ray, handed to Ray Data when a run begins."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from ray_apr.core.names import names_in

if TYPE_CHECKING:
    import ray.data

_BLOCK_ROWS = 65_536
"""Of a block of a Ray Dataset, which is encoded by one task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where some rows are from."""

    name: str
    """Of a file or dataset."""
    num_rows: int
    lines: Sequence[int] | None = None
    """Of a file of lines: that of each row, from 1. None: its rows count, from 0."""


def field_of(place: str | None, row: int, column: str, *, name: str = "prompts") -> str:
    """What an error calls a value.

    Args:
        place: Where a person finds its row; None: nobody knows.
        row: Of the dataset.
        column: Of the value.
        name: Of the dataset.
    """
    return f"{place}, {column}" if place else f"{name}[{row}].{column}"


class PromptRows:
    """Rows of files of prompts.

    Args:
        rows: An Arrow table, or JSON objects, of which Arrow would have to guess the types.
        origins: Where they are from, in their order; none where nobody knows.
    """

    def __init__(
        self, rows: pa.Table | Sequence[Mapping[str, Any]], origins: Sequence[Origin] = ()
    ) -> None:
        self._rows = rows
        self._origins = tuple(origins)

    def __len__(self) -> int:
        return len(self._rows)

    def __deepcopy__(self, memo: dict[int, Any]) -> PromptRows:
        """The same: rows do not change, and copies of settings need not be as large as them."""
        return self

    @property
    def names(self) -> list[str]:
        """Columns; those of the first row where each row has its own."""
        if isinstance(self._rows, pa.Table):
            return list(self._rows.column_names)
        return list(self._rows[0]) if self._rows else []

    def place(self, row: int) -> str | None:
        """Where a person finds a row: its file, and the line or row of it; None: nobody knows.

        Example:
            >>> origins = [Origin(name="a.jsonl", num_rows=2, lines=[1, 3])]
            >>> PromptRows([{"prompt": "1+1="}, {"prompt": ""}], origins).place(1)
            'a.jsonl, line 3'
        """
        for origin in self._origins:
            if row < origin.num_rows:
                lines = origin.lines
                which = f"row {row}" if lines is None else f"line {lines[row]}"
                return f"{origin.name}, {which}"
            row -= origin.num_rows
        return None

    def slice(self, start: int, stop: int) -> list[Mapping[str, Any]]:
        """Some of the rows."""
        if isinstance(self._rows, pa.Table):
            rows: list[Mapping[str, Any]] = self._rows.slice(start, stop - start).to_pylist()
            return rows
        return list(self._rows[start:stop])

    def row(self, index: int) -> Mapping[str, Any]:
        """A row as a run has it: with None for columns that only others have."""
        if isinstance(self._rows, pa.Table):
            return self.slice(index, index + 1)[0]
        return dict.fromkeys(names_in(self._rows)) | dict(self._rows[index])

    def column(self, name: str) -> list[Any]:
        """Values of a column; None where a row has none."""
        if isinstance(self._rows, pa.Table):
            return list(self._rows[name].to_pylist())
        return [row.get(name) for row in self._rows]

    def gaps(self) -> Iterator[tuple[str, list[int], int]]:
        """Columns that some rows of a file lack and no fewer have.

        Yields:
            The column, the rows that lack it, and how many of that file have it.
        """
        lacks: dict[str, list[int]]
        if isinstance(self._rows, pa.Table):
            nulls = {name: self._rows[name].is_null() for name in self.names}
            lacks = {
                name: pc.indices_nonzero(of_rows).to_pylist() for name, of_rows in nulls.items()
            }
        else:
            lacks = {
                name: [i for i, row in enumerate(self._rows) if row.get(name) is None]
                for name in names_in(self._rows)
            }
        for name, lacking in lacks.items():
            start = 0
            for origin in self._origins:
                end = start + origin.num_rows
                rows = lacking[bisect_left(lacking, start) : bisect_left(lacking, end)]
                if 0 < len(rows) <= (others := origin.num_rows - len(rows)):
                    yield name, rows, others
                start = end

    def untyped(self) -> Iterator[tuple[str, Exception]]:
        """Columns whose values Arrow has no type for, and what it says of them."""
        if isinstance(self._rows, pa.Table):
            return
        for name in names_in(self._rows):
            try:
                pa.array(self.column(name))
            except (pa.ArrowException, OverflowError) as error:
                yield name, error

    def to_dataset(self) -> ray.data.Dataset:
        """The rows as a Ray Dataset; Ray runs already.

        They are here already: Ray Data's own readers would start several processes for a file,
        which takes longer than a file of prompts does.
        """
        import ray.data

        if isinstance(self._rows, pa.Table):
            begins = range(0, max(1, len(self)), _BLOCK_ROWS)
            blocks = [self._rows.slice(begin, _BLOCK_ROWS) for begin in begins]
            return ray.data.from_blocks(blocks)  # `from_arrow` waits for a task of each
        return ray.data.from_items(list(self._rows))
