"""Steps that are trained on some ranks, checkpoint after checkpoint, without Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ray.train
import torch

from ray_apr.scheduling.batch import RankBatch
from ray_apr.train.checkpoint import Progress, full_parameters, take_snapshot
from ray_apr.train.learner import Learner, prepare_process
from ray_apr.train.spec import LearnerSpec
from tests.train_batches import process_group, start_ranks

Rows = Sequence[Mapping[str, Any]]
"""Of a step's batch, one a rank."""


class Trained(NamedTuple):
    """What came out of some steps."""

    figures: list[dict[str, Any]]
    """Of each step."""
    weights: dict[str, torch.Tensor]
    """After the last one, whole."""
    checkpoint: ray.train.Checkpoint
    """The same with the optimizer's state."""


def train_on(
    num_ranks: int,
    folder: Path,
    spec: LearnerSpec,
    steps: Sequence[Rows],
    checkpoint: ray.train.Checkpoint | None = None,
) -> Trained:
    """Train some steps, each rank in a process of its own.

    Args:
        num_ranks: How many there are.
        folder: An empty one, or one that is not there yet.
        spec: What is trained.
        steps: Their batches, laid out for so many ranks.
        checkpoint: What they begin with; None: the model.
    """
    folder.mkdir(exist_ok=True)
    start_ranks(_train, num_ranks, folder, spec, steps, checkpoint)
    figures, weights = torch.load(folder / "trained.pt")
    return Trained(figures, weights, ray.train.Checkpoint(str(folder / "checkpoint")))


def _train(
    rank: int,
    num_ranks: int,
    folder: Path,
    spec: LearnerSpec,
    steps: Sequence[Rows],
    checkpoint: ray.train.Checkpoint | None,
) -> None:
    with process_group(folder, rank=rank, world_size=num_ranks):
        prepare_process(spec, num_ranks)
        learner = Learner(spec, torch.device("cpu"))
        begin = learner.restore(checkpoint)
        figures = [dict(learner.train(RankBatch.from_row(rows[rank]))) for rows in steps]
        done, version = begin.step + len(steps), begin.policy_version + len(steps)
        progress = Progress(step=done, policy_version=version)
        take_snapshot(learner.model, learner.optimizer, progress).write(folder / "checkpoint")
        weights = {name: w.clone() for name, w in full_parameters(learner.model)}
        if rank == 0:
            torch.save((figures, weights), folder / "trained.pt")
