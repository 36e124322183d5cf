"""A process that writes the files of a rank's state (train/state_files.py)."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import re
import signal
import subprocess
from dataclasses import replace

import pytest
import torch
from torch.distributed.checkpoint import CheckpointException

from ray_apr.config import AlgorithmConfig, TrainConfig
from ray_apr.core.threads import in_thread
from ray_apr.train import state_files
from ray_apr.train.checkpoint import Progress, load_checkpoint, take_snapshot
from ray_apr.train.fsdp import build_model, build_optimizer
from ray_apr.train.host_memory import HostMemory
from ray_apr.train.staging import Stager
from ray_apr.train.state_files import Scribe
from ray_apr.train.step import train_step
from tests.tiny_model import make_tiny_model
from tests.train_batches import make_batches, make_samples, process_group

CPU = torch.device("cpu")
TRAIN = TrainConfig(learning_rate=1e-2, compile=False, reduce_dtype="bfloat16")
PROGRESS = Progress(step=1, policy_version=1)
LIMIT_S = 60.0


class Trained:
    """A model whose state a scribe may write."""

    def __init__(self, folder) -> None:
        self.model = build_model(str(folder), TRAIN, CPU)
        self.optimizer = build_optimizer(self.model, TRAIN)
        self.stager = Stager(self.model, self.optimizer)
        self.scribe = Scribe(self.stager)

    def take_step(self, step):
        (row,) = make_batches(make_samples(seed=step), step=step)
        train_step(self.model, self.optimizer, row, AlgorithmConfig(), TRAIN)

    def snapshot(self):
        return take_snapshot(self.model, self.optimizer, PROGRESS, self.stager)

    @property
    def process(self):
        return self.scribe._process._process


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """With its process, which takes seconds to begin, for as many tests as leave it alive."""
    path = tmp_path_factory.mktemp("trained")
    folder = make_tiny_model(path / "model", hidden_size=32)
    with process_group(path):
        made = Trained(folder)
        made.take_step(0)
        yield made
        made.scribe.close()
        made.stager.close()


def shards(folder):
    return {file.name: file.read_bytes() for file in folder.glob("__0_*")}


def content(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_it_writes_what_the_train_worker_would(trained, tmp_path):
    """To the byte, and from a state that training has changed meanwhile."""
    pids = set()
    for step in range(2):
        here, there = tmp_path / f"here-{step}", tmp_path / f"there-{step}"
        snapshot = trained.snapshot()
        snapshot.write(here)
        trained.stager.wait()
        trained.take_step(step + 1)
        snapshot.write(there, scribe=trained.scribe)
        written, expected = content(there), content(here)
        assert written.keys() == expected.keys()
        assert len(shards(here)) == 4 and shards(there) == shards(here)
        sums, others = (json.loads(found["checksums-0.json"]) for found in (written, expected))
        assert sums.pop(".metadata") != others.pop(".metadata"), "it has the name of the folder"
        assert sums == others and {*sums} > {*shards(here)}
        pids.add(trained.process.pid)
    assert len(pids) == 1, "one process writes all"
    assert load_checkpoint(there, trained.model, trained.optimizer).step == 1


def test_it_reads_the_memory_of_now(trained, tmp_path):
    """Which is another one with the same path where the copies have other shapes than before."""
    trained.snapshot().write(tmp_path / "a", scribe=trained.scribe)
    memory, trained.stager._twins = trained.stager.memory, []
    path = memory.path
    trained.take_step(7)
    gc.collect()  # what other tests have left closes its files
    with contextlib.ExitStack() as below:  # a file gets the lowest number that is free
        while (file := below.enter_context(open(os.devnull))).fileno() < memory._file:
            pass
        file.close()
        snapshot = trained.snapshot()
        trained.stager.wait()
    snapshot.write(tmp_path / "b", scribe=trained.scribe)
    assert trained.stager.memory.path == path
    trained.snapshot().write(tmp_path / "c")
    assert shards(tmp_path / "b") == shards(tmp_path / "c") != shards(tmp_path / "a")


def test_the_train_worker_writes_what_its_process_has_died_of(trained, tmp_path, caplog):
    trained.snapshot().write(tmp_path / "a", scribe=trained.scribe)
    dead = trained.process
    dead.kill()
    dead.wait(LIMIT_S)
    with caplog.at_level(logging.WARNING, logger=state_files.__name__):
        trained.snapshot().write(tmp_path / "b", scribe=trained.scribe)
    assert "has failed: it has died, with exit code -9; the train worker writes" in caplog.text
    assert trained.scribe._process is None
    assert len(shards(tmp_path / "b")) == 4
    load_checkpoint(tmp_path / "b", trained.model, trained.optimizer)
    trained.snapshot().write(tmp_path / "c", scribe=trained.scribe)
    assert trained.process.pid != dead.pid
    assert shards(tmp_path / "c") == shards(tmp_path / "a")


def test_the_train_worker_says_why_neither_can_write(trained, tmp_path, caplog):
    folder = tmp_path / "c"
    folder.mkdir()
    for number in range(4):
        (folder / f"__0_{number}_0.distcp").symlink_to("/dev/full")
    with pytest.raises(CheckpointException, match=r"No space left|failed writing"):
        trained.snapshot().write(folder, scribe=trained.scribe)
    assert re.search(r"has failed: \w+Error: .*(No space|failed writing)", caplog.text)


def test_a_module_of_the_users_with_a_name_of_pythons_does_not_matter(
    trained, tmp_path, monkeypatch
):
    """As beside a script, whose folder the train worker has in front, where it is the cwd, too."""
    (tmp_path / "queue.py").write_text("raise SystemExit(3)")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    trained.scribe.close()
    trained.snapshot().write(tmp_path / "c", scribe=trained.scribe)
    assert trained.process.poll() is None


def test_its_process_ends_with_the_train_worker_in_the_middle_of_a_file(
    trained, tmp_path, monkeypatch
):
    orders, make = [], Scribe._order
    monkeypatch.setattr(Scribe, "_order", lambda *a: orders.append(make(*a)) or orders[0])
    trained.snapshot().write(tmp_path / "c", scribe=trained.scribe)
    folder = tmp_path / "d"
    folder.mkdir()
    for number in range(4):
        os.mkfifo(folder / f"__0_{number}_0.distcp")
    scribes, process = trained.scribe._process, trained.process
    scribes._line.send(replace(orders[0], folder=folder))
    reader = in_thread((folder / "__0_0_0.distcp").open, "reader").result(LIMIT_S)
    with reader:
        scribes._line.close(), scribes._socket.close()  # as a worker's end does
        assert process.wait(LIMIT_S) == 0


def test_its_process_ends_where_a_fork_of_the_train_worker_keeps_the_line(monkeypatch):
    worker = subprocess.Popen(["sleep", "1000"])
    try:
        with monkeypatch.context() as patch:
            patch.setattr(os, "getpid", lambda: worker.pid)
            process = state_files._Process()
        with pytest.raises(state_files._FailedError, match="no attribute 'memory'"):
            process.ask("no order")
    finally:
        worker.kill()
        worker.wait(LIMIT_S)
    assert process._process.wait(LIMIT_S) == 0


def test_one_that_takes_too_long_is_ended(trained, tmp_path, monkeypatch):
    """Also before it takes an order, of which a pipe holds but a part."""
    trained.scribe.close()
    monkeypatch.setattr(state_files, "WRITE_LIMIT_S", 0.3)
    monkeypatch.setattr(state_files, "_END_LIMIT_S", 0.3)
    monkeypatch.setattr(state_files, "_MAIN", "import time; time.sleep(100)")
    make, begun = Scribe._order, []
    monkeypatch.setattr(
        Scribe, "_order", lambda *a: (make(*a), begun.append(trained.process), "x" * (1 << 22))[2]
    )
    with pytest.raises(CheckpointException, match=r"was not written within 0.3 s; see whether"):
        trained.snapshot().write(tmp_path / "c", scribe=trained.scribe)
    assert begun[0].poll() == -signal.SIGKILL


def test_memory_that_no_host_has_is_refused():
    with pytest.raises(MemoryError, match="more than this host has"):
        HostMemory(1 << 50)
    memory = HostMemory(10)
    for _ in range(2):
        memory.close()
