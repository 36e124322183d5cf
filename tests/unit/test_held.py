"""Datasets that are there are read without a task of Ray Data."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from ray_apr.compat import ray as compat_ray
from ray_apr.data import held
from ray_apr.data.held import first_row, held_tables
from tests.fakes import ArrowDataset

NONE = pa.table({"prompt": pa.array([], pa.string())})
TABLES = [NONE, pa.table({"prompt": ["a", "b"]}), pa.table({"prompt": ["c"]})]


class Held(ArrowDataset):
    """One that is there; nobody may ask Ray Data for its rows."""

    def size_bytes(self) -> int:
        return sum(table.nbytes for table in self._tables)


class Read(ArrowDataset):
    """One that Ray Data has to read."""

    def take(self, limit: int) -> list[dict[str, Any]]:
        return pa.concat_tables(self._tables).slice(0, limit).to_pylist()


@pytest.fixture(autouse=True)
def _as_ray_has_them(monkeypatch):
    monkeypatch.setattr(compat_ray, "MaterializedDataset", Held, raising=False)
    monkeypatch.setattr("ray.get", lambda refs: refs)


def test_what_is_there_is_read_here():
    assert held_tables(Held(TABLES)) == TABLES
    assert first_row(Held(TABLES)) == {"prompt": "a"}
    assert first_row(Held([NONE])) is None and first_row(Held([])) is None


@pytest.mark.parametrize("limit", [{"_ROWS": 2}, {"_BYTES": 4}])
def test_what_is_large_or_not_there_is_left_to_ray_data(monkeypatch, limit):
    assert held_tables(Read(TABLES)) is None
    assert first_row(Read(TABLES)) == {"prompt": "a"}
    assert first_row(Read([NONE])) is None
    for name, value in limit.items():
        monkeypatch.setattr(held, name, value)
    assert held_tables(Held(TABLES)) is None
