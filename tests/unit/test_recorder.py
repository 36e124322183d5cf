"""The run folder on a full disk, and steps that are shown (run/recorder.py, run/folder.py)."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from ray_apr.core.exceptions import ResourceError, TrainError
from ray_apr.run import folder
from ray_apr.run.causes import write_error_log
from ray_apr.run.final import write_final, write_json
from ray_apr.run.folder import add_row, append, last_row, open_rows, put_text, read_rows
from ray_apr.run.recorder import ROW_FILES, RunRecorder


class FullDisk:
    """A file of rows on a disk that has room for some more bytes."""

    def __init__(self, path: Path, room: int) -> None:
        self._file = open_rows(path)
        self.name = str(path)
        self.room = room

    def write(self, data: memoryview) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = self._file.write(data[: self.room])
        self.room -= written
        return written

    def __getattr__(self, name: str):
        return getattr(self._file, name)


def full(*args: object, **kwargs: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_lines_that_find_no_room_leave_no_part_of_them(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    add_row(file, {"step": 0})
    disk = FullDisk(file, room=5)
    with pytest.raises(ResourceError, match=r"metrics.jsonl cannot be written.*No space.*--resume"):
        append(disk, '{"step": 1}\n{"step": 2}\n')
    assert file.read_text() == '{"step": 0}\n'
    disk.room = 100
    append(disk, '{"step": 1}\n')
    assert read_rows(file) == [{"step": 0}, {"step": 1}]


def test_a_row_takes_the_place_of_one_that_was_cut_off(tmp_path: Path) -> None:
    """known fault: it was written behind it, so that the file could not be read any more."""
    file = tmp_path / "restarts.jsonl"
    for text in ('{"at": 0}\n{"at": 1, "cut o', '{"at": 0}\n', ""):
        file.write_text(text)
        add_row(file, {"at": 2})
        assert read_rows(file) == [*([{"at": 0}] if text else []), {"at": 2}]


@pytest.mark.parametrize("torn", ["", '{"step": 7', '{"text": "' + 500 * "x"])
@pytest.mark.parametrize("num_rows", [0, 1, 2, 50])
@pytest.mark.parametrize("length", [0, 20, 300])
def test_the_last_whole_row_is_read_from_the_end(tmp_path, monkeypatch, torn, num_rows, length):
    """known fault: a run that went on read all of its rows to find the last one."""
    monkeypatch.setattr(folder, "_PIECE", 32)
    file = tmp_path / "metrics.jsonl"
    assert last_row(file) == {}
    rows = [{"step": step, "text": "é" * length} for step in range(num_rows)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows) + torn)
    assert last_row(file) == (rows[-1] if rows else {})


def test_no_more_than_the_end_of_a_long_file_is_read(tmp_path):
    file = tmp_path / "metrics.jsonl"
    with file.open("wb") as rows:
        rows.seek(1 << 34)  # a hole, which takes no room
        rows.write(b'\n{"step": 7}\n{"ste')
    assert last_row(file) == {"step": 7}


@pytest.mark.parametrize("kept", range(5))
async def test_samples_of_a_step_that_a_kill_cut_off_are_completed(tmp_path: Path, kept) -> None:
    """known fault: the step's first rows said that it was there, and `verify` missed the others."""
    rows = [[{"step": step, "sample_id": f"{step}-{i}"} for i in range(4)] for step in range(3)]
    recorder = RunRecorder(str(tmp_path), 0.0)
    for step in (0, 1):
        await recorder.record_many("sample", rows[step])
    await recorder.close()
    file = tmp_path / "samples.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[: 4 + kept]) + lines[-1][:9])
    recorder = RunRecorder(str(tmp_path), 0.0)
    for step in (1, 1, 2, 0):  # Ray makes the call again, and so may the trainer
        await recorder.record_many("sample", rows[step])
    await recorder.close()
    assert read_rows(file) == [row for step in rows for row in step]


async def test_no_row_is_taken_after_one_that_was_lost(tmp_path: Path) -> None:
    recorder = RunRecorder(str(tmp_path), 0.0)
    await recorder.record("step", {"step": 0})
    disk = recorder._files["ended"] = FullDisk(tmp_path / "ended.jsonl", room=3)
    with pytest.raises(ResourceError, match="make room"):
        await recorder.record("ended", {"sample_id": "a"})
    disk.room = 100
    with pytest.raises(ResourceError, match=r"ended.jsonl"):
        await recorder.record("step", {"step": 1})
    assert read_rows(tmp_path / "metrics.jsonl") == [{"step": 0}]
    assert read_rows(tmp_path / "ended.jsonl") == []
    assert await recorder.num_steps() == 1


async def test_steps_that_were_shown_are_not_kept(tmp_path: Path) -> None:
    recorder = RunRecorder(str(tmp_path), 0.0)
    for step in range(100):
        await recorder.record("step", {"step": step})
        rows, _ = await recorder.follow(step, 1.0)
        assert [row["step"] for row in rows] == [step]
        assert len(recorder._steps) == 1
    assert await recorder.num_steps() == 100


async def test_what_starts_is_told_until_it_has_started(tmp_path: Path) -> None:
    recorder = RunRecorder(str(tmp_path), 0.0)
    for doing in ("start", "load the model", ""):
        await recorder.record("doing", {"part": "train workers", "doing": doing})
        await recorder.record("status", {"waiting_for": "a reward"})
        _, status = await recorder.follow(0, 0.01)
        told = {"train workers": doing} if doing else {}
        assert status == {"waiting_for": "a reward", "doing": told}
    await recorder.record("step", {"step": 0})
    assert "doing" not in read_rows(tmp_path / "metrics.jsonl")[0]


async def test_steps_that_a_dead_recorder_wrote_are_shown_by_the_next_one(tmp_path: Path) -> None:
    first = RunRecorder(str(tmp_path), 0.0)
    for step in range(5):
        await first.record("step", {"step": step})
    await first.close()
    second = RunRecorder(str(tmp_path), 0.0)
    await second.record("step", {"step": 5})
    rows, _ = await second.follow(3, 1.0)
    assert [row["step"] for row in rows] == [3, 4, 5]


def test_a_file_that_cannot_be_written_is_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "config.json"
    put_text(file, "before")
    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(ResourceError, match=r"config.json cannot be written.*No space"):
        write_json(file, {"a": 1})
    assert file.read_text() == "before" and list(tmp_path.iterdir()) == [file]


def test_a_full_disk_hides_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Path, "write_text", full)
    error = TrainError("the checkpoint could not be written")
    assert not write_error_log(tmp_path / "error.log", error, error)
    write_final(tmp_path, {"steps": 3}, error)
    assert caplog.text.count("No space left") == 2
    with pytest.raises(ResourceError, match=r"final.json cannot be written"):
        write_final(tmp_path, {"steps": 3}, None)


def test_final_figures_are_written_whole(tmp_path: Path) -> None:
    write_final(tmp_path, {"steps": 3}, None)
    assert json.loads((tmp_path / "final.json").read_text())["status"] == "ok"


@pytest.mark.parametrize("kind", ["ended", "dropped", "timeline", "evaluation"])
async def test_a_call_that_ray_makes_again_after_a_death_doubles_no_row(
    tmp_path: Path, kind: str
) -> None:
    rows = [{"id": i, "start_s": 12.5 + i, "end_s": 13.5} for i in range(3)]
    recorder = RunRecorder(str(tmp_path), 10.0)
    await recorder.record_many(kind, rows[:2])
    again = RunRecorder(str(tmp_path), 10.0)  # the first one died before it answered
    await again.record_many(kind, rows[:2])
    await again.record_many(kind, rows[2:])
    assert [row["id"] for row in read_rows(tmp_path / ROW_FILES[kind])] == [0, 1, 2]


async def test_an_evaluation_whose_call_ray_makes_again_is_there_once(tmp_path: Path) -> None:
    row = {"policy_version": 4, "reward_mean": 0.5}
    samples = [{"policy_version": 4, "response": "x" * 1000, "n": i} for i in range(2000)]
    recorder = RunRecorder(str(tmp_path), 10.0)
    assert await recorder.last_evaluation() == {}
    await recorder.record_evaluation(row, samples)
    again = RunRecorder(str(tmp_path), 10.0)  # the first one died before it answered
    await again.record_evaluation(row, samples)
    assert await again.last_evaluation() == row
    assert read_rows(tmp_path / ROW_FILES["evaluation"]) == [row]
    assert read_rows(tmp_path / ROW_FILES["evaluation_sample"]) == samples
