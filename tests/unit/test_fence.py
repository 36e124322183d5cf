"""A folder that another start of the run takes over (data/fence.py)."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray.train

from ray_apr.core.exceptions import FolderTakenError, TrainError
from ray_apr.data import fence as module
from ray_apr.data.fence import LEFT_S, LOOK_S, OWNER_FILE, Fence
from ray_apr.data.journal import Journal, JournalFolder
from ray_apr.run import controller, resume
from ray_apr.run.causes import write_error_log
from ray_apr.run.final import write_final
from ray_apr.run.folder import read_rows
from ray_apr.run.journals import journal_of
from ray_apr.run.recorder import RunRecorder
from ray_apr.run.restarts import run_with_restarts
from ray_apr.run.resume import hold_folder
from tests.fakes import FakeClock
from tests.run_specs import run_spec


@pytest.fixture
def clock(monkeypatch):
    clock = FakeClock()
    fake = SimpleNamespace(
        monotonic=clock, strftime=module.time.strftime, gmtime=module.time.gmtime
    )
    monkeypatch.setattr(module, "time", fake)
    return clock


@pytest.fixture
def old(tmp_path):
    fence = Fence("old", str(tmp_path))
    fence.take()
    return fence


@pytest.fixture
def new(tmp_path):
    return Fence("new", str(tmp_path))


def test_the_last_one_has_the_folder_and_the_one_before_hears_who_that_is(old, new, tmp_path):
    old.check()
    new.take()
    new.check()
    with pytest.raises(FolderTakenError) as caught:
        old.check()
    assert f"{tmp_path} was taken over at " in str(caught.value)
    assert f" by process {os.getpid()} on host " in str(caught.value)
    assert [file.name for file in tmp_path.iterdir()] == [OWNER_FILE]


@pytest.mark.parametrize(("look_s", "pause_s"), [(0.001, 0.1), (0.5, LOOK_S)])
def test_looks_take_a_hundredth_of_the_time_and_go_on_once_it_is_lost(
    old, new, clock, monkeypatch, look_s, pause_s
):
    found = Fence._found
    monkeypatch.setattr(Fence, "_found", lambda fence: (clock.advance(look_s), found(fence))[1])
    old.check_soon()
    new.take()
    clock.advance(0.95 * pause_s - look_s)
    old.check_soon()
    clock.advance(0.1 * pause_s)
    for _ in range(2):
        with pytest.raises(FolderTakenError):
            old.check_soon()


def test_another_process_looks_at_once(old, new):
    old.check_soon()
    new.take()
    with pytest.raises(FolderTakenError):
        pickle.loads(pickle.dumps(old)).check_soon()


@pytest.mark.parametrize("text", [None, "", "{"])
def test_what_cannot_be_read_says_nothing(old, tmp_path, text):
    file = tmp_path / OWNER_FILE
    file.unlink() if text is None else file.write_text(text)
    old.check()


async def test_a_journal_gets_no_frame_of_one_that_has_lost_the_run(old, new, tmp_path, clock):
    folder = JournalFolder.of(str(tmp_path / "journal"), old._filesystem)
    folder = JournalFolder(folder.filesystem, folder.path, old)
    journal = Journal(folder, "worker")
    journal.note(position=1)
    await journal.flush()
    new.take()
    for position in (2, 3):
        journal.note(position=position)
        with pytest.raises(FolderTakenError):
            await journal.flush()
    frames = list(folder.frames(0, "worker"))
    assert [frame.notes["events"] for frame in frames] == [[{"position": 1}]]
    assert folder.broken_epochs() == [], "the epoch may be the other one's, too"


async def test_a_run_folder_gets_no_row_of_one_that_has_lost_it(old, new, tmp_path, clock):
    recorder = RunRecorder(str(tmp_path), 0.0, fence=old)
    await recorder.record("step", {"step": 0})
    new.take()
    for step in (1, 2):
        with pytest.raises(FolderTakenError):
            await recorder.record("step", {"step": step})
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [0]


def test_the_end_of_one_that_has_lost_the_folder_is_not_in_it(tmp_path):
    error = FolderTakenError("taken over")
    write_final(tmp_path, {"steps": 3}, error)
    assert not write_error_log(tmp_path / "error.log", ValueError("of a worker"), error)
    assert not list(tmp_path.iterdir())


def test_it_does_not_begin_again_by_itself():
    tries = []

    def attempt():
        tries.append(1)
        raise FolderTakenError("taken over")

    with pytest.raises(FolderTakenError):
        run_with_restarts(
            attempt, max_failures=-1, num_steps=9, last_step=int, show=print, sleep=tries.append
        )
    assert tries == [1]


@pytest.mark.parametrize(("machine", "waits"), [("this", []), ("another", [LEFT_S])])
def test_who_takes_a_folder_from_another_machine_waits_for_its_last_write(
    tmp_path, monkeypatch, machine, waits
):
    waited = []
    monkeypatch.setattr(resume, "time", SimpleNamespace(sleep=waited.append))
    fences = [Fence("old", str(tmp_path / name)) for name in ("run", "kept")]
    for fence in fences:
        assert not fence.take(), "nobody had it"
    if machine == "another":
        file = tmp_path / "run" / OWNER_FILE
        file.write_text(file.read_text().replace(module._machine(), "another"))
    with hold_folder(tmp_path, [Fence("new", str(tmp_path / name)) for name in ("run", "kept")]):
        assert waited == waits


def test_a_run_that_was_taken_over_in_its_pause_does_not_begin_again(tmp_path, monkeypatch):
    begun = []

    def choose_ranks(spec):
        begun.append(spec)
        raise TrainError("a train worker died")

    failures = ray.train.FailureConfig(max_failures=1)
    run = ray.train.RunConfig(name="a-run", storage_path=str(tmp_path), failure_config=failures)
    spec = run_spec(run=run)
    monkeypatch.setattr(controller.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(controller.ray, "cluster_resources", dict)
    for name in ("check_hub_model", "check_engine", "make_run_folder", "tidy_folder"):
        monkeypatch.setattr(controller, name, lambda *_: None)
    spec.folder.mkdir()
    monkeypatch.setattr(controller, "with_counted_steps", lambda spec, prompts, show: spec)
    monkeypatch.setattr(controller, "choose_ranks", choose_ranks)
    monkeypatch.setattr(controller, "last_step", lambda spec: 0)
    take = Fence("another", str(spec.folder)).take
    monkeypatch.setattr(controller.time, "sleep", lambda seconds: take())
    with pytest.raises(FolderTakenError):
        controller.run(spec, None)
    assert len(begun) == 1


@pytest.mark.parametrize("where", ["local", "remote"])
def test_a_start_takes_the_run_folder_and_that_of_its_checkpoints(tmp_path, monkeypatch, where):
    monkeypatch.chdir(tmp_path)
    path = str(tmp_path / "kept")
    storage = path if where == "local" else f"file://{path}"
    run = ray.train.RunConfig(name="a-run", storage_path=storage)
    first, second = run_spec(run=run), run_spec(run=run)
    first.folder.mkdir(parents=True)
    with hold_folder(first.folder, first.fences):
        pass
    assert first.taken_over is None and journal_of(first).fence._owner == first.owner
    (first.folder / ".lock").unlink()  # as where another host has not got it
    with hold_folder(second.folder, second.fences):
        assert second.taken_over is None
        for fence in first.fences:
            with pytest.raises(FolderTakenError):
                fence.check()
    assert isinstance(first.taken_over, FolderTakenError)
    assert (Path(path) / "a-run" / OWNER_FILE).is_file() and (first.folder / OWNER_FILE).is_file()
