"""Checkpoints that are written while training goes on (train/saving.py)."""

from __future__ import annotations

import errno
import json
import random
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.fs
import pytest
import ray.train
import torch
from ray.train import CheckpointUploadMode
from safetensors.torch import load_file
from torch.distributed.checkpoint import CheckpointException

from ray_apr.config import AlgorithmConfig, TrainConfig
from ray_apr.core.exceptions import FolderTakenError, StarvedError, TrainError
from ray_apr.data.fence import Fence
from ray_apr.data.resumption import LIST_COPY_FILE, LIST_FILE, Counters, RolloutProgress
from ray_apr.data.saved_samples import samples_table
from ray_apr.train import checkpoint, saving, staging
from ray_apr.train.checkpoint import Progress, load_checkpoint, take_snapshot
from ray_apr.train.fsdp import build_model, build_optimizer, local_tensor
from ray_apr.train.offload import Offload
from ray_apr.train.saving import CheckpointWriter
from ray_apr.train.step import train_step
from tests.tiny_model import make_tiny_model
from tests.train_batches import make_batches, make_samples, process_group

CPU = torch.device("cpu")
TRAIN = TrainConfig(learning_rate=1e-3, steps=6, lr_schedule="cosine", warmup_steps=1)
SHARDED = replace(TRAIN, reduce_dtype="bfloat16")
"""With one type for everything a single rank has nothing to shard."""
LIMIT_S = 30.0


class Storage:
    """Ray Train's, in a local folder or, with `is_remote`, one that is reached through a copy."""

    def __init__(self, folder: Path, *, is_remote: bool = False) -> None:
        self.experiment_fs_path = str(folder)
        local = pyarrow.fs.LocalFileSystem()
        self.storage_filesystem = pyarrow.fs.SubTreeFileSystem("/", local) if is_remote else local
        self.refusals = 0

    def build_checkpoint_path_from_name(self, name: str) -> str:
        return f"{self.experiment_fs_path}/{name}"

    def persist_current_checkpoint(self, checkpoint, name):
        if self.refusals:
            self.refusals -= 1
            raise OSError("AWS Error SLOW_DOWN")
        path = self.build_checkpoint_path_from_name(name)
        self.storage_filesystem.create_dir(path)
        pyarrow.fs.copy_files(checkpoint.path, path, destination_filesystem=self.storage_filesystem)
        return ray.train.Checkpoint(path, self.storage_filesystem)


class RayTrain:
    """Takes reports as Ray Train does: uploads in one thread, and lists them in order."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self.may_write = threading.Event()
        self.may_write.set()
        self.may_list = threading.Event()
        self.may_list.set()
        self.reports: list[tuple] = []
        """Figures, and the mode."""
        self.listed: list = []
        self.errors: list[BaseException] = []
        """What ends the run."""
        self._thread = ThreadPoolExecutor(1)

    def report(
        self, metrics, checkpoint=None, checkpoint_dir_name=None, *, checkpoint_upload_mode,
        checkpoint_upload_fn=None, delete_local_checkpoint_after_upload=None,
    ):  # fmt: skip
        self.reports.append((metrics, checkpoint_upload_mode))
        name = checkpoint_dir_name or f"checkpoint_{len(self.reports)}"
        if checkpoint is None:
            return
        if checkpoint_upload_mode is CheckpointUploadMode.SYNC:
            self._upload(checkpoint, name, checkpoint_upload_fn)
        else:
            self._thread.submit(self._in_thread, checkpoint, name, checkpoint_upload_fn)

    def _in_thread(self, *args):
        self.may_write.wait(LIMIT_S)
        try:
            self._upload(*args)
        except Exception as error:  # noqa: BLE001  (as Ray Train does: no BaseException)
            self.errors.append(error)

    def _upload(self, checkpoint, name, upload):
        for _ in range(3):
            try:
                kept = upload(checkpoint, name)
                break
            except Exception as error:
                if "SLOW_DOWN" not in str(error):
                    raise
        self.may_list.wait(LIMIT_S)
        self.listed.append(types.SimpleNamespace(checkpoint=kept))
        (Path(self.storage.experiment_fs_path) / LIST_FILE).write_text(str(len(self.listed)))

    def ask(self, mode, timeout_s):
        time.sleep(0.01)
        return list(self.listed)


class Control:
    """Rank 0's line, of which nothing is used but this."""

    def __init__(self) -> None:
        self.written: list[int] = []
        self.oldest_epochs: list[int | None] = []

    def capture(self):
        progress = RolloutProgress(
            seed=0, num_prompts=4, position=2, pending=(1,), counters=Counters()
        )
        return lambda: (progress, samples_table([]))

    def checkpoint_written(self, step, taken_at, oldest_epoch):
        assert taken_at <= time.time()
        self.oldest_epochs.append(oldest_epoch)
        self.written.append(step)


@pytest.fixture
def folder(tmp_path):
    source = make_tiny_model(tmp_path / "model", hidden_size=32)
    with process_group(tmp_path):
        yield source


@pytest.fixture
def train(tmp_path, monkeypatch):
    return in_ray_train(monkeypatch, Storage(tmp_path / "run"))


def in_ray_train(monkeypatch, storage):
    fake = RayTrain(storage)
    context = types.SimpleNamespace(get_storage=lambda: storage)
    monkeypatch.setattr(ray.train, "get_context", lambda: context)
    monkeypatch.setattr(ray.train, "report", fake.report)
    monkeypatch.setattr(ray.train, "get_all_reported_checkpoints", fake.ask)
    return fake


def build(folder, settings=TRAIN):
    model = build_model(str(folder), settings, CPU)
    return model, build_optimizer(model, settings)


def take_steps(model, optimizer, steps, settings=TRAIN):
    for step in steps:
        (row,) = make_batches(make_samples(seed=step), step=step)
        train_step(model, optimizer, row, AlgorithmConfig(), settings)
        torch.rand(3)  # as a model with dropout draws
        random.random(), np.random.random()  # as a loss of the user's may


def state_of(model, optimizer):
    """Copies of all that training changes, and the next random numbers."""
    taken = take_snapshot(model, optimizer, Progress(step=0, policy_version=0))
    state = taken.state()
    found = {n: local_tensor(w).clone() for n, w in state["model"].items()}
    for name, values in state["optimizer"]["state"].items():
        found |= {f"{name}.{k}": local_tensor(v).clone() for k, v in values.items()}
    groups = state["optimizer"]["param_groups"]
    drawn = torch.tensor([*torch.rand(4), random.random(), np.random.random(), random.gauss()])
    return found | {"random": drawn}, [g["lr"] for g in groups]


def check_same(one, other):
    assert one[1] == other[1]
    assert one[0].keys() == other[0].keys()
    for name, value in one[0].items():
        assert torch.equal(value, other[0][name]), name


@pytest.mark.parametrize("settings", [TRAIN, SHARDED])
def test_what_is_written_during_further_steps_is_of_one_moment(folder, train, settings):
    """Bit for bit: model, optimizer, schedule and random state, also of a second checkpoint, which
    is copied to the memory of the first."""
    model, optimizer = build(folder, settings)
    control = Control()
    writer = CheckpointWriter(model, optimizer, control, source=str(folder))
    take_steps(model, optimizer, range(2), settings)
    for step in (2, 4):
        train.may_write.clear()
        writer.save({"step": step - 1}, Progress(step=step, policy_version=step))
        take_steps(model, optimizer, [step, step + 1], settings)
        writer.report({"step": step + 1})
        train.may_write.set()
        writer.wait()
    writer.report({"step": 6})
    writer.close()
    whole = state_of(model, optimizer)
    assert control.written == [2, 4] and train.errors == []
    assert [metrics["step"] for metrics, _ in train.reports] == [1, 3, 3, 5, 6]
    background, at_once = CheckpointUploadMode.ASYNC, CheckpointUploadMode.SYNC
    assert [mode for _, mode in train.reports] == [background] * 4 + [at_once]
    for step, listed in zip((2, 4), train.listed, strict=True):
        again, its_optimizer = build(folder, settings)
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(123)
        progress = load_checkpoint(listed.checkpoint.path, again, its_optimizer)
        assert progress == Progress(step=step, policy_version=step, lora_rank=0)
        take_steps(again, its_optimizer, range(step, 6), settings)
        check_same(state_of(again, its_optimizer), whole)


def test_beside_a_gpu_another_process_writes(folder, train, monkeypatch):
    """A thread would hold up the loop, which launches what the device computes."""
    monkeypatch.setattr(saving, "compute_device", lambda _: torch.device("cuda"))
    model, optimizer = build(folder)
    take_steps(model, optimizer, [0])
    expected = state_of(model, optimizer)
    writer = CheckpointWriter(model, optimizer, Control(), source=str(folder))
    writer.save({}, Progress(step=1, policy_version=1))
    take_steps(model, optimizer, [1])
    writer.wait()
    process = writer._scribe._process._process
    assert process.poll() is None
    writer.close()
    assert process.poll() is not None
    restored = build(folder)
    load_checkpoint(train.listed[-1].checkpoint.path, *restored)
    found, rates = state_of(*restored)
    check_same((found | {"random": expected[0]["random"]}, rates), expected)


def test_a_state_that_leaves_the_device_is_written_as_it_was(folder, train, monkeypatch):
    parts = staging._parts
    monkeypatch.setattr(staging, "_parts", lambda pairs: time.sleep(0.3) or parts(pairs))
    model, optimizer = build(folder, SHARDED)
    offload = Offload([model], optimizer)
    writer = CheckpointWriter(model, optimizer, Control(), source=str(folder), stays=False)
    for step in range(2):
        take_steps(model, optimizer, [step])
        expected, rates = state_of(model, optimizer)
        train.may_write.clear()
        writer.save({}, Progress(step=step + 1, policy_version=step + 1))
        is_copied = writer._stager._copy.done()
        if is_copied:
            offload.to_host()
        train.may_write.set()
        writer.wait()
        assert is_copied, "what leaves is copied before"
        offload.to_device()
        restored = build(folder, SHARDED)
        load_checkpoint(train.listed[-1].checkpoint.path, *restored)
        found, its_rates = state_of(*restored)
        check_same((found | {"random": expected["random"]}, its_rates), (expected, rates))
    writer.close()


def test_no_checkpoint_of_a_run_that_another_driver_has_gets_into_the_list(folder, train):
    """It could be listed, and the other driver's list was gone."""
    model, optimizer = build(folder)
    old, new = [Fence(name, train.storage.experiment_fs_path) for name in ("old", "new")]
    writer = CheckpointWriter(model, optimizer, Control(), source=str(folder), fence=old)
    old.take()
    writer.save({}, Progress(step=1, policy_version=1), name="first")
    new.take()
    with pytest.raises(FolderTakenError):
        writer.save({}, Progress(step=2, policy_version=2), name="second")
    assert len(train.listed) == 1


def test_one_checkpoint_at_a_time_is_under_way(folder, train):
    model, optimizer = build(folder)
    control = Control()
    writer = CheckpointWriter(model, optimizer, control, source=str(folder))
    train.may_list.clear()
    writer.save({}, Progress(step=1, policy_version=1))
    second = threading.Thread(target=writer.save, args=({}, Progress(step=2, policy_version=2)))
    second.start()
    time.sleep(0.3)
    assert len(train.reports) == 1 and control.written == []
    train.may_list.set()
    second.join(LIMIT_S)
    writer.close()
    assert len(train.reports) == 2 and control.written == [1, 2]
    copy = Path(train.storage.experiment_fs_path) / LIST_COPY_FILE
    assert copy.read_text() == "2", "of the last one that is durable"


def test_the_journal_goes_with_the_checkpoints_that_it_follows(folder, train):
    """Before one is removed all of it stays: steps since the begin can be replayed."""
    model, optimizer = build(folder)
    control, epochs = Control(), iter((1, 2, 4))

    def capture():
        progress = RolloutProgress(
            seed=0, num_prompts=4, position=2, pending=(), counters=Counters(), epoch=next(epochs)
        )
        return lambda: (progress, samples_table([]))

    control.capture = capture
    writer = CheckpointWriter(model, optimizer, control, source=str(folder))
    for step in (1, 2, 3):
        writer.save({}, Progress(step=step, policy_version=step))
        writer.wait()
        if step == 2:
            del train.listed[0]  # as Ray Train does when the next one comes
    writer.close()
    assert control.oldest_epochs == [None, None, 2]


def test_a_named_checkpoint_and_the_last_one_are_waited_for(folder, train, tmp_path):
    model, optimizer = build(folder)
    writer = CheckpointWriter(model, optimizer, Control(), source=str(folder))
    writer.save({}, Progress(step=1, policy_version=1))
    writer.save({}, Progress(step=1, policy_version=1), name="mine")
    assert (tmp_path / "run" / "mine" / "rollout.json").is_file()
    writer.report({"step": 1})
    writer.save({}, Progress(step=2, policy_version=2), is_last=True)
    writer.close()
    last = Path(train.listed[-1].checkpoint.path)
    assert (last / "hf" / "model.safetensors").is_file()
    progress = json.loads((last / "progress.json").read_text())
    assert progress == {"step": 2, "policy_version": 2, "lora_rank": 0}
    modes = [mode.value for _, mode in train.reports]
    assert modes[:2] == ["ASYNC", "SYNC"] and modes[-1] == "SYNC"


def test_each_checkpoint_has_the_model_of_its_step_where_it_is_asked_for(folder, train):
    """known fault: the best checkpoint of a run could be loaded by ray_apr alone."""
    model, optimizer = build(folder)
    writer = CheckpointWriter(model, optimizer, Control(), source=str(folder), exports=True)
    exported = []
    for step in range(2):
        take_steps(model, optimizer, [step])
        writer.save({}, Progress(step=step + 1, policy_version=step + 1))
        saved = load_file(Path(train.listed[-1].checkpoint.path) / "hf/model.safetensors")
        of_model = dict(checkpoint.full_parameters(model))
        assert all(torch.equal(saved[name], of_model[name]) for name in saved)
        exported.append(saved)
    writer.close()
    assert any(not torch.equal(value, exported[1][name]) for name, value in exported[0].items())
    assert {mode.value for _, mode in train.reports} == {"SYNC"}


@pytest.mark.parametrize("part", ["state", "rollout"])
def test_a_checkpoint_that_cannot_be_written_ends_the_run(folder, train, monkeypatch, part):
    def fail(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    if part == "state":
        monkeypatch.setattr(
            "torch.distributed.checkpoint.filesystem.FileSystemWriter.write_data", fail
        )
    else:
        monkeypatch.setattr(saving, "save_rollout", fail)
    model, optimizer = build(folder)
    control = Control()
    writer = CheckpointWriter(model, optimizer, control, source=str(folder))
    monkeypatch.setattr(saving, "CHECKPOINT_LIMIT_S", 1.0)
    writer.save({}, Progress(step=3, policy_version=3))
    with pytest.raises(StarvedError, match="checkpoint of step 3 was not written within 1 s"):
        writer.wait()  # Ray Train has ended the run long before
    deadline = time.monotonic() + 20
    while not train.errors and time.monotonic() < deadline:
        time.sleep(0.01)
    (error,) = train.errors
    assert isinstance(error, TrainError)
    assert "step 3" in str(error) and "OSError: [Errno 28] No space left on device" in str(error)
    assert isinstance(error.__cause__, CheckpointException if part == "state" else OSError)
    assert train.listed == control.written == []
    left = Path(train.storage.experiment_fs_path)
    assert not left.exists() or list(left.iterdir()) == [], "it would take room"


def test_a_host_without_memory_for_a_copy_is_told_of_that(folder, train, monkeypatch):
    """known fault: it was to mend the storage, and to make room there."""

    def refuse(*_):
        raise MemoryError("Unable to allocate 96.0 GiB")

    monkeypatch.setattr(staging.Stager, "_take_memory", refuse)
    writer = CheckpointWriter(*build(folder), Control(), source=str(folder))
    writer.save({}, Progress(step=3, policy_version=3))
    deadline = time.monotonic() + LIMIT_S
    while not train.errors and time.monotonic() < deadline:
        time.sleep(0.01)
    (error,) = train.errors
    assert "copied to the host's memory" in str(error) and "96.0 GiB" in str(error)
    assert "storage" not in str(error)


def test_an_error_of_the_rollout_side_stays_what_it_is(folder, train):
    def captured():
        raise StarvedError("the rollout worker does not answer")

    control = Control()
    control.capture = lambda: captured
    model, optimizer = build(folder)
    writer = CheckpointWriter(model, optimizer, control, source=str(folder))
    with pytest.raises(StarvedError, match="rollout worker"):
        writer.save({}, Progress(step=1, policy_version=1), name="mine")


def test_files_are_written_once_where_an_upload_is_tried_again(folder, tmp_path, monkeypatch):
    storage = Storage(tmp_path / "run", is_remote=True)
    train = in_ray_train(monkeypatch, storage)
    storage.refusals, copies = 2, []
    model, optimizer = build(folder)
    writer = CheckpointWriter(model, optimizer, Control(), source=str(folder))
    make = saving.tempfile.TemporaryDirectory

    def noted():
        copies.append(make())
        return copies[-1]

    monkeypatch.setattr(saving.tempfile, "TemporaryDirectory", noted)
    writer.save({}, Progress(step=1, policy_version=1))
    writer.close()
    (copy,) = copies
    assert not Path(copy.name).exists()
    with train.listed[0].checkpoint.as_directory() as kept:
        whole = Progress(step=1, policy_version=1, lora_rank=0)
        assert load_checkpoint(kept, *build(folder)) == whole
