"""The read task of a rank's stream (data/datasource.py), without Ray."""

from __future__ import annotations

import logging
import threading
import types

import numpy as np
import pytest
import ray.cloudpickle
from ray.data._internal.execution import metadata_fetcher, streaming_executor
from ray.exceptions import ObjectLostError

from ray_apr.core.exceptions import ResourceError
from ray_apr.data import datasource as module
from ray_apr.data.parts import PartName
from ray_apr.scheduling.grant import BatchTicket
from tests.fakes import FakeClock

LIMIT_S = 10.0
"""Of what another thread does."""


class Plan:
    """A batch of one row."""

    step = 3

    def groups_of(self, rank):
        return [0]

    def rank_batch(self, rank, groups):
        return types.SimpleNamespace(to_row=lambda: {"payload": groups[0]})


class Buffer:
    """Hands out one step, whose samples are lost `num_lost` times."""

    def __init__(self, monkeypatch, num_lost: int) -> None:
        self.num_lost = num_lost
        self.asked: list[tuple] = []
        self.readers: set[str] = set()
        clock = FakeClock()
        monkeypatch.setattr(module, "Part", lambda name, whom: self)
        monkeypatch.setattr(ray, "get", self.get)
        fake_time = types.SimpleNamespace(monotonic=clock, sleep=clock.advance)
        monkeypatch.setattr(module, "time", fake_time)

    def ask(self, verb, rank, last_step, again, *, reader, limit_s):
        self.asked.append((verb, rank, last_step))
        self.readers.add(reader)
        return BatchTicket() if last_step == 3 else BatchTicket(plan=Plan(), refs=("ref",))

    def get(self, refs, timeout):
        if self.num_lost:
            self.num_lost -= 1
            raise ObjectLostError("0" * 56, None, "")
        return [ray.cloudpickle.dumps("samples")]

    def rows(self) -> list[dict]:
        return [row for table in module._read(PartName("b", "ns"), 0, 1.0)
                for row in table.to_pylist()]  # fmt: skip


def test_samples_that_are_lost_come_again_with_the_next_rollout_worker(monkeypatch):
    buffer = Buffer(monkeypatch, 300)
    assert buffer.rows() == [{"payload": "samples"}]
    assert len(buffer.asked) == 302 and len(buffer.readers) == 1
    buffer.rows()
    assert len(buffer.readers) == 2, "another process is another reader"


def test_samples_that_stay_lost_end_the_run_with_what_to_do(monkeypatch):
    """known fault: the read task asked for them without end, and the trainer starved."""
    buffer = Buffer(monkeypatch, 10_000)
    with pytest.raises(ResourceError, match=r"step 3 were lost .*within 180 s.*--resume"):
        buffer.rows()


@pytest.mark.parametrize("asked", [None, "1"])
def test_rows_of_a_stream_wait_for_no_thread_of_ray_data(monkeypatch, asked):
    """known fault: each row took 0.1 s more, in which Ray Data waited for nothing."""
    monkeypatch.setattr(metadata_fetcher, "_PREFETCH_ON_THREAD", True)
    monkeypatch.delenv("RAY_DATA_METADATA_PREFETCH_ON_THREAD", raising=False)
    if asked:
        monkeypatch.setenv("RAY_DATA_METADATA_PREFETCH_ON_THREAD", asked)
    fetchers = []

    def iter_batches(**_):
        fetchers.append(streaming_executor.make_metadata_fetcher())  # as each executor does
        yield {"step": np.array([3]), "tokens": np.array([[1, 2]])}

    (row,) = module.rows_of(types.SimpleNamespace(iter_batches=iter_batches))
    assert row["step"] == 3 and row["tokens"].tolist() == [1, 2]
    is_inline = isinstance(fetchers[0], metadata_fetcher.InlineMetadataFetcher)
    assert is_inline == (asked is None)


def test_the_first_row_is_read_while_the_reader_does_something_else():
    """known fault: the first step waited for Ray Data to start a process."""
    read, wanted = threading.Event(), threading.Event()

    def iter_batches(**_):
        read.set()
        yield {"step": np.array([0])}
        assert wanted.wait(LIMIT_S), "no further row is read before it is asked for"
        yield {"step": np.array([1])}

    rows = module.rows_of(types.SimpleNamespace(iter_batches=iter_batches))
    assert read.wait(LIMIT_S)
    assert next(rows) == {"step": 0}
    wanted.set()
    assert list(rows) == [{"step": 1}]


def test_a_stream_that_fails_before_its_first_row_tells_the_reader():
    def iter_batches(**_):
        raise ResourceError("no batch")
        yield

    rows = module.rows_of(types.SimpleNamespace(iter_batches=iter_batches))
    with pytest.raises(ResourceError, match="no batch"):
        next(rows)
    assert list(module.rows_of(types.SimpleNamespace(iter_batches=lambda **_: iter(())))) == []


@pytest.mark.parametrize(
    ("variables", "level"), [({}, "INFO"), ({module.LOGGING: "mine"}, "DEBUG")]
)
def test_a_stream_is_not_logged_at_length(monkeypatch, variables, level):
    """known fault: Ray Data wrote 11 MB an hour of a run into files that it does not cut."""
    monkeypatch.setattr(logging.getLogger("ray.data"), "level", logging.DEBUG)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert not list(module.rows_of(types.SimpleNamespace(iter_batches=lambda **_: iter(()))))
    assert logging.getLevelName(streaming_executor.logger.getEffectiveLevel()) == level
