"""Which checkpoint is the last one, by Ray Train's own list of them."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import ray.train
from ray.train.v2._internal.constants import CHECKPOINT_MANAGER_SNAPSHOT_FILENAME
from ray.train.v2._internal.execution.checkpoint.checkpoint_manager import CheckpointManager
from ray.train.v2._internal.execution.storage import StorageContext
from ray.train.v2._internal.execution.training_report import _TrainingReport

from ray_apr.config import TrainConfig
from ray_apr.core.exceptions import ResourceError
from ray_apr.data.resumption import LIST_COPY_FILE, LIST_FILE, PROGRESS_FILE
from ray_apr.run.resume import find_begin, last_step
from tests.run_specs import run_spec
from tests.saved_checkpoints import write_checkpoint


def spec_of(folder: Path):
    run = ray.train.RunConfig(name="run", storage_path=str(folder))
    return run_spec(run=run, train=TrainConfig(steps=9, seed=3))


async def write_listed(folder: Path, *steps: int, num_to_keep: int | None = None) -> None:
    """Write checkpoints, and have Ray Train's list take each."""
    storage = StorageContext(str(folder), "run")
    config = ray.train.CheckpointConfig(num_to_keep=num_to_keep)
    manager = CheckpointManager(config, storage)
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


async def test_the_newest_checkpoints_stay(tmp_path):
    await write_listed(tmp_path, 2, 4, 6, num_to_keep=2)
    kept = sorted(path.name for path in (tmp_path / "run").glob("checkpoint_?"))
    assert kept == ["checkpoint_4", "checkpoint_6"]
    assert last_step(spec_of(tmp_path)) == 6
