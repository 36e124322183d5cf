"""Which checkpoint is the last one, by Ray Train's own list of them."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import ray.train
from ray.train.v2._internal.constants import CHECKPOINT_MANAGER_SNAPSHOT_FILENAME
from ray.train.v2._internal.execution.checkpoint.checkpoint_manager import CheckpointManager
from ray.train.v2._internal.execution.storage import StorageContext
from ray.train.v2._internal.execution.training_report import _TrainingReport

from ray_apr.config import TrainConfig
from ray_apr.core.clock import unix_s
from ray_apr.core.exceptions import ConfigError, ResourceError
from ray_apr.data.resumption import (
    LIST_COPY_FILE,
    LIST_FILE,
    PROGRESS_FILE,
    ROLLOUT_FILE,
    Begin,
    RolloutProgress,
)
from ray_apr.run import retention
from ray_apr.run.checks import check_retention
from ray_apr.run.resume import (
    find_begin,
    find_side_begin,
    hold_folder,
    kept_checkpoints,
    last_step,
)
from ray_apr.train.checksums import OF_ROLLOUT, checksums, write_checksums
from tests.run_specs import run_spec
from tests.saved_checkpoints import write_checkpoint


def spec_of(folder: Path):
    run = ray.train.RunConfig(name="run", storage_path=str(folder))
    return run_spec(run=run, train=TrainConfig(steps=9, seed=3))


async def write_listed(
    folder: Path, *steps: int, num_to_keep: int | None = None, hours: float | None = None
) -> None:
    """Write checkpoints, and have Ray Train's list take each."""
    storage = StorageContext(str(folder), "run")
    train = TrainConfig(num_checkpoints_to_keep=num_to_keep or 99, hours_to_keep_checkpoints=hours)
    spec = dataclasses.replace(spec_of(folder), train=train)
    manager = CheckpointManager(spec.run_config.checkpoint_config, storage)
    for step in steps:
        path = Path(storage.build_checkpoint_path_from_name(f"checkpoint_{step}"))
        write_checkpoint(path)
        (path / PROGRESS_FILE).write_text(f'{{"step": {step}, "policy_version": {step}}}')
        checkpoint = ray.train.Checkpoint(str(path), storage.storage_filesystem)
        manager.register_checkpoint(
            _TrainingReport(metrics={"step": step}, checkpoint=checkpoint, validation=False)
        )
        await asyncio.sleep(0)


async def test_a_checkpoint_that_is_not_listed_counts_for_nothing(tmp_path):
    await write_listed(tmp_path, 2, 4)
    write_checkpoint(tmp_path / "run" / "checkpoint_6")  # whole, but no rank has reported it
    half = tmp_path / "run" / "checkpoint_8"
    half.mkdir()
    (half / "__0_0.distcp").write_bytes(b"cut o")
    assert last_step(spec_of(tmp_path)) == 4
    assert find_begin(spec_of(tmp_path)).step == 4


KILLED = """
    import asyncio, sys, time
    from pathlib import Path
    from tests.unit import test_last_checkpoint as test
    from ray_apr.train import checkpoint

    folder = Path(sys.argv[1])
    asyncio.run(test.write_listed(folder, 2, 4))
    write = checkpoint.write_samples

    def write_half(file, table):
        write(file, table)
        print("half", flush=True)
        time.sleep(60)

    checkpoint.write_samples = write_half
    test.write_checkpoint(folder / "run" / "checkpoint_6")
"""


def test_a_writer_that_is_killed_leaves_the_checkpoint_before_as_the_last(tmp_path):
    code = textwrap.dedent(KILLED)
    command = [sys.executable, "-c", code, str(tmp_path)]
    root = Path(__file__).parents[2]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "half\n"
        writer.send_signal(signal.SIGKILL)
    half = tmp_path / "run" / "checkpoint_6"
    assert sorted(file.name for file in half.iterdir()) == ["progress.json", "samples.arrow"]
    assert find_begin(spec_of(tmp_path)).step == 4


async def test_a_list_that_was_cut_off_is_taken_from_its_copy(tmp_path, caplog):
    assert LIST_FILE == CHECKPOINT_MANAGER_SNAPSHOT_FILENAME
    await write_listed(tmp_path, 2, 4)
    listed, copy = tmp_path / "run" / LIST_FILE, tmp_path / "run" / LIST_COPY_FILE
    whole = listed.read_bytes()
    copy.write_bytes(whole)
    for cut in (b"", whole[: len(whole) // 2]):
        listed.write_bytes(cut)
        assert last_step(spec_of(tmp_path)) == 4
        assert listed.read_bytes() == whole and "was cut off" in caplog.text
    copy.unlink()
    listed.write_bytes(b"{")
    (tmp_path / "run" / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(ResourceError, match="cannot be read"):
        find_begin(spec_of(tmp_path))


async def test_a_list_that_is_gone_is_taken_from_its_copy(tmp_path):
    """known fault: the run began anew, and all rows of its folder were taken out."""
    await write_listed(tmp_path, 2, 4)
    listed = tmp_path / "run" / LIST_FILE
    listed.rename(tmp_path / "run" / LIST_COPY_FILE)
    (tmp_path / "run" / "metrics.jsonl").touch()
    assert find_begin(spec_of(tmp_path)).step == 4
    assert listed.exists()


async def test_who_only_looks_mends_no_list_of_a_run_that_goes_on(tmp_path):
    """known fault: a dry run, or a second trainer, that looked while Ray Train wrote its list put
    an older one in its place."""
    await write_listed(tmp_path, 2, 4)
    listed = tmp_path / "run" / LIST_FILE
    (tmp_path / "run" / LIST_COPY_FILE).write_bytes(whole := listed.read_bytes())
    listed.write_bytes(whole[:9])
    (tmp_path / "run" / "metrics.jsonl").touch()
    with hold_folder(tmp_path / "run"):
        with pytest.raises(ResourceError, match="cannot be read"):
            find_begin(spec_of(tmp_path), holds=False)
        assert listed.read_bytes() == whole[:9]
    assert find_begin(spec_of(tmp_path), holds=False).step == 4


async def test_the_newest_checkpoints_stay(tmp_path):
    await write_listed(tmp_path, 2, 4, 6, num_to_keep=2)
    assert kept_steps(tmp_path) == [4, 6]
    assert last_step(spec_of(tmp_path)) == 6


def kept_steps(folder: Path) -> list[int]:
    """Steps whose checkpoints have a folder; it is those of Ray Train's list."""
    steps = sorted(int(p.name.partition("_")[2]) for p in (folder / "run").glob("checkpoint_?"))
    assert [step for step, _ in kept_checkpoints(spec_of(folder))] == steps
    return steps


def age(folder: Path, step: int, hours: float) -> None:
    """Have a checkpoint be so old."""
    at = time.time() - 3600 * hours
    os.utime(folder / "run" / f"checkpoint_{step}" / PROGRESS_FILE, (at, at))


async def test_checkpoints_that_are_too_old_go_when_one_is_added(tmp_path):
    await write_listed(tmp_path, 1, 2, 3, num_to_keep=4, hours=2)
    for step, hours in ((1, 5.0), (2, 2.1), (3, 1.9)):
        age(tmp_path, step, hours)
    assert kept_steps(tmp_path) == [1, 2, 3]
    await write_listed(tmp_path, 4, num_to_keep=4, hours=2)  # as a run that goes on
    assert kept_steps(tmp_path) == [3, 4]
    await write_listed(tmp_path, 5, 6, 7, num_to_keep=4, hours=2)
    assert kept_steps(tmp_path) == [4, 5, 6, 7]  # by number


async def test_the_newest_checkpoint_stays_however_old_it_is(tmp_path):
    await write_listed(tmp_path, 2, hours=1)
    age(tmp_path, 2, 48.0)
    assert last_step(spec_of(tmp_path)) == 2
    await write_listed(tmp_path, 4, hours=1)
    assert kept_steps(tmp_path) == [4]


@pytest.mark.parametrize("step_h", [-48, 48])
async def test_checkpoints_do_not_go_for_a_step_of_the_clock(tmp_path, monkeypatch, step_h):
    """known fault: once the clock was set back, new checkpoints were older than they may be."""
    await write_listed(tmp_path, 1, 2, num_to_keep=4, hours=2)
    old, now = unix_s(), time.time() + 3600 * step_h
    for step, at in ((1, old if step_h < 0 else now), (2, now)):
        os.utime(tmp_path / "run" / f"checkpoint_{step}" / PROGRESS_FILE, (at, at))
    monkeypatch.setattr(retention.time, "time", lambda: now)
    await write_listed(tmp_path, 3, num_to_keep=4, hours=2)
    assert kept_steps(tmp_path) == [1, 2, 3]


async def test_checkpoints_whose_age_cannot_be_told_stay(tmp_path, caplog):
    await write_listed(tmp_path, 2, 4, num_to_keep=3, hours=1)
    for step in (2, 4):
        age(tmp_path, step, 9.0)
    spec = dataclasses.replace(spec_of(tmp_path), train=TrainConfig(hours_to_keep_checkpoints=1))
    config = spec.run_config.checkpoint_config
    assert config.num_to_keep == 1
    (tmp_path / "run" / LIST_FILE).write_text("{")
    assert config.num_to_keep == 2 and "do not go by age this time" in caplog.text


def test_an_age_beside_a_score_is_refused():
    best = ray.train.CheckpointConfig(checkpoint_score_attribute="reward_mean")
    check_retention(ray.train.RunConfig(checkpoint_config=best), None)
    check_retention(ray.train.RunConfig(), 1.0)
    with pytest.raises(ConfigError, match=r"to_keep_checkpoints = 1\.0: the best checkpoints"):
        check_retention(ray.train.RunConfig(checkpoint_config=best), 1.0)


@pytest.mark.parametrize("gone", [PROGRESS_FILE, ROLLOUT_FILE])
async def test_a_checkpoint_that_goes_while_it_is_read_beside_a_trainer_may_be_read_again(
    tmp_path, gone
):
    """Ray Train removes it once a newer one is listed; known fault: that was an error for good."""
    await write_listed(tmp_path, 2, 4)
    (tmp_path / "run" / "checkpoint_4" / gone).unlink()
    with pytest.raises(ResourceError, match=rf"removed meanwhile: .*has no {gone}"):
        find_side_begin(spec_of(tmp_path), Begin())
    with pytest.raises(ConfigError, match=f"has no {gone}"):
        find_begin(spec_of(tmp_path))


@pytest.mark.parametrize("epoch, step", [(0, 4), (1, 2), (9, 2)])
async def test_a_side_begins_again_where_its_trainer_began_or_has_saved_since(
    tmp_path, epoch, step
):
    """A checkpoint of an attempt before is in what the attempt began with."""
    await write_listed(tmp_path, 4)
    file = tmp_path / "run" / "checkpoint_4" / ROLLOUT_FILE
    progress = RolloutProgress.from_values(json.loads(file.read_text()))
    file.write_text(dataclasses.replace(progress, epoch=1).to_json())
    write_checksums(file.parent, OF_ROLLOUT, checksums([file]))
    found = find_side_begin(spec_of(tmp_path), Begin(step=2, policy_version=2, epoch=epoch))
    assert (found.step, found.of_engines, found.epoch) == (step, step, max(1, epoch))
    assert found.replayed.takes_over, "the engines work for a worker that is dead"
