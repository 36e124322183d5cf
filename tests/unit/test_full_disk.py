"""Row files and journal on a disk that is full (run/recorder.py, data/journal.py), where there may
be one; `make load` has whole runs on it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from ray_apr.core.exceptions import ResourceError, RolloutError
from ray_apr.data.journal import Journal, JournalFolder
from ray_apr.data.resumption import Begin
from ray_apr.run.command import Command
from ray_apr.run.folder import keep_rows, read_rows
from ray_apr.run.journals import header_of, journal_of, with_journal
from ray_apr.run.recorder import RunRecorder
from tests.run_specs import run_spec
from tests.small_disk import NoDiskError, fill, small_disk


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    try:
        with small_disk(tmp_path, 1 << 20):
            yield tmp_path
    except NoDiskError as reason:
        pytest.skip(str(reason))


async def test_rows_that_find_no_room_leave_whole_ones_and_the_next_recorder_goes_on(disk):
    recorder = RunRecorder(str(disk), 0.0)
    fill(disk / "ballast", 8192)
    with pytest.raises(
        ResourceError, match=r"metrics\.jsonl cannot be written: .*No space"
    ) as full:
        for step in range(10_000):
            await recorder.record("step", {"step": step})
    assert f"make room in {disk}" in str(full.value) and "--resume" in str(full.value)
    await recorder.close()
    rows = read_rows(disk / "metrics.jsonl")
    (disk / "ballast").unlink()
    recorder = RunRecorder(str(disk), 0.0)
    await recorder.record("step", {"step": len(rows)})
    await recorder.close()
    assert [row["step"] for row in read_rows(disk / "metrics.jsonl")] == list(range(len(rows) + 1))


def test_a_run_that_goes_on_without_room_says_which_file_has_none(disk):
    """known fault: an error of the system without the file, beside which a half one stayed."""
    file = disk / "metrics.jsonl"
    rows = [{"step": step, "x": "x" * 200} for step in range(99)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    before = file.read_bytes()
    fill(disk / "ballast", 4096)
    with pytest.raises(ResourceError, match=r"metrics\.jsonl cannot be written: .*No space"):
        keep_rows(file, lambda row: row["step"] < 90)
    assert file.read_bytes() == before and not list(disk.glob("*.new"))
    fill(disk / "more", 0)
    command = Command(config="x" * 4096, working_directory="/")
    with pytest.raises(ResourceError, match=r"command\.json cannot be written: .*No space"):
        command.write(disk)
    (disk / "ballast").unlink()
    assert keep_rows(file, lambda row: row["step"] < 90) == (90, 9)


async def write_until_full(journal: Journal, disk: Path) -> None:
    journal.note(granted=[0, 0])
    await journal.flush()
    fill(disk / "ballast", 0)
    for step in range(200):
        journal.note(trained=[step, {"of": "x" * 100}])
        await journal.flush()


async def test_a_journal_that_found_no_room_is_no_ground_to_begin_again_beside_a_trainer(disk):
    spec = run_spec()
    spec = dataclasses.replace(spec, run=dataclasses.replace(spec.run, storage_path=str(disk)))
    folder = journal_of(spec)
    header = header_of(spec) | {"num_prompts": 3}
    journal = Journal(folder, "buffer", header=header, state=lambda: {"counters": {}})
    await write_until_full(journal, disk)
    assert folder.broken_epochs() == [0] and list(folder.frames(0, "buffer"))
    with pytest.raises(RolloutError, match=r"not be written to its end.*--resume"):
        with_journal(spec, Begin(), first=0, trainer_lives=True)
    assert with_journal(spec, Begin(), first=0).epoch == 1, "with its checkpoint it goes on"
    assert with_journal(spec, Begin(), first=1, trainer_lives=True).epoch == 1, (
        "a later one has all"
    )


async def test_a_journal_that_cannot_even_be_marked_ends_the_run(disk, monkeypatch):
    def read_only(*args: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(JournalFolder, "mark_broken", read_only)
    journal = Journal(JournalFolder.of(f"{disk}/journal"), "worker")
    with pytest.raises(ResourceError, match=r"Read-only file system; make room.*--resume"):
        await write_until_full(journal, disk)
    with pytest.raises(ResourceError):
        await journal.flush()
