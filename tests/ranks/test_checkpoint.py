"""Checkpoints of several ranks: their writing by processes, and damage, which all ranks name."""

from __future__ import annotations

import json

import pytest
import torch

from ray_apr.config import TrainConfig
from ray_apr.core.exceptions import APRError
from ray_apr.train.checkpoint import Progress, load_checkpoint, take_snapshot
from ray_apr.train.fsdp import build_model, build_optimizer, local_tensor
from ray_apr.train.staging import Stager
from ray_apr.train.state_files import Scribe, StatePlanner
from tests.tiny_model import make_tiny_model
from tests.train_batches import process_group, start_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

FILES = (".metadata", "__0_0_0.distcp", "__1_0_0.distcp")


def work(rank, world_size, folder):
    torch.set_num_threads(1)
    with process_group(folder, rank=rank, world_size=world_size):
        train = TrainConfig(num_threads=1)
        model = build_model(str(folder / "model"), train, torch.device("cpu"))
        optimizer = build_optimizer(model, train)
        take_snapshot(model, optimizer, Progress(step=1, policy_version=1)).write(folder / "c")
        said = {}
        for name in FILES:
            file = folder / "c" / name
            content = file.read_bytes()
            torch.distributed.barrier()
            if rank == 0:
                file.write_bytes(content[:-100])
            torch.distributed.barrier()
            try:
                load_checkpoint(folder / "c", model, optimizer)
            except APRError as error:
                said[name] = f"{type(error).__name__}: {error}"
            torch.distributed.barrier()
            if rank == 0:
                file.write_bytes(content)
        (folder / f"said-{rank}.json").write_text(json.dumps(said))


def test_all_ranks_name_the_damaged_file(tmp_path):
    """known fault: the others, of whom the run tells the first, blamed model and train.lora, and
    the run was begun again."""
    make_tiny_model(tmp_path / "model", hidden_size=32)
    start_ranks(work, 2, tmp_path)
    for rank in range(2):
        said = json.loads((tmp_path / f"said-{rank}.json").read_text())
        for name in FILES:
            assert said[name].startswith(f"ConfigError: checkpoint = '{tmp_path}/c/{name}'"), rank


def work_with_scribes(rank, world_size, folder):
    """Shards of several ranks, some of which are empty, by processes of their own."""
    torch.set_num_threads(1)
    with process_group(folder, rank=rank, world_size=world_size):
        train = TrainConfig(num_threads=1, reduce_dtype="bfloat16")
        model = build_model(str(folder / "model"), train, torch.device("cpu"))
        optimizer = build_optimizer(model, train)
        stager = Stager(model, optimizer)
        scribe = Scribe(stager)
        for step in range(3):
            snapshot = take_snapshot(
                model, optimizer, Progress(step=step, policy_version=1), stager
            )
            here, there = folder / f"here-{step}", folder / f"there-{step}"
            snapshot.write(here)
            if step == 1 and rank == 1:
                StatePlanner._planned = {}  # this rank plans again
            if step == 2 and rank == 1:
                scribe._process._process.kill()
            snapshot.write(there, scribe=scribe)
            for parameter in model.parameters():
                local_tensor(parameter.data).add_(rank + 1)
        scribe.close()
        stager.close()


def test_processes_of_several_ranks_write_what_their_threads_would(tmp_path):
    make_tiny_model(tmp_path / "model", hidden_size=32)
    start_ranks(work_with_scribes, 3, tmp_path)
    contents = []
    for step in range(3):
        here, there = (
            {f.name: f.read_bytes() for f in (tmp_path / f"{name}-{step}").glob("__*")}
            for name in ("here", "there")
        )
        assert here == there and {name[2] for name in here} == {"0", "1", "2"}
        contents.append(here)
    assert contents[0] != contents[1] != contents[2]
