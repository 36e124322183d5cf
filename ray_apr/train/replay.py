"""Steps of a run once more, on processes of this machine, one a rank, without Ray.

    rows of each step ─► learner of each rank, from the same checkpoint ─► figures of rank 0

Invariants, kept by `train_again`:
    * Learner, checks and order of the steps are those of the run (`train.loop`).
    * No process stays behind.
"""

from __future__ import annotations

import datetime
import pickle
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import ray.cloudpickle
import ray.train
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from ray_apr.core.exceptions import TrainError
from ray_apr.core.staleness import next_version
from ray_apr.scheduling.batch import RankBatch
from ray_apr.train.checkpoint import Progress
from ray_apr.train.figures import Figures
from ray_apr.train.learner import Learner, prepare_process
from ray_apr.train.spec import LearnerSpec
from ray_apr.train.step import check_batch

_LIMIT = datetime.timedelta(seconds=600)
"""Of a collective, as in a run."""
_RESULT = "result.pickle"


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """What is trained again."""

    learner: LearnerSpec
    checkpoint: ray.train.Checkpoint | None
    """What it begins with; None: the model as it was loaded."""
    max_staleness: int
    rows: Sequence[Sequence[Mapping[str, Any]]]
    """[steps][ranks], as `RankBatch.to_row` makes them."""
    backend: str
    """Of the ranks' collectives."""
    uses_gpus: bool
    """Whether each rank has a GPU of this machine."""


class TrainedAgain(NamedTuple):
    """What came out of it."""

    figures: list[Figures]
    """Of each step, over all ranks."""
    advantages: list[float]
    """[B], of the last step."""


def train_again(steps: Steps) -> TrainedAgain:
    """Train steps of a run again, each rank in a process of its own.

    Waits for: these processes. Unblocked by: their end; where one fails, the others are ended.

    Raises:
        TrainError: If one of them fails.
    """
    # by value where it is of a file of the user's, which a new process cannot import
    given = ray.cloudpickle.dumps(steps)
    with tempfile.TemporaryDirectory(prefix="ray-apr-replay-") as folder:
        ranks = mp.start_processes(
            _train_rank,
            (given, folder),
            nprocs=len(steps.rows[0]),
            join=False,
            daemon=True,
            start_method="spawn",
        )
        try:
            while not ranks.join(timeout=_LIMIT.total_seconds()):
                pass
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
            raise TrainError(f"a rank of the replay failed: {_last_line(error)}") from error
        finally:
            for process in ranks.processes:
                if process.is_alive():
                    process.kill()
        result: TrainedAgain = pickle.loads((Path(folder) / _RESULT).read_bytes())
    return result


def _last_line(error: Exception) -> str:
    """Of the traceback that is the text of an error of another process: what was raised."""
    return str(error).strip().rpartition("\n")[2]


def _train_rank(rank: int, given: bytes, folder: str) -> None:
    """What the process of one rank does."""
    steps: Steps = ray.cloudpickle.loads(given)
    num_ranks = len(steps.rows[0])
    device = torch.device("cuda", rank) if steps.uses_gpus else torch.device("cpu")
    if steps.uses_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group(
        steps.backend,
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=num_ranks,
        timeout=_LIMIT,
    )
    try:
        prepare_process(steps.learner, num_ranks)
        result = _train(steps, rank, Learner(steps.learner, device))
    finally:
        dist.destroy_process_group()
    if rank == 0:
        (Path(folder) / _RESULT).write_bytes(pickle.dumps(result))


def _train(steps: Steps, rank: int, learner: Learner) -> TrainedAgain:
    progress = learner.restore(steps.checkpoint)
    figures, advantages_B = [], torch.empty(0)

    def keep(found_B: torch.Tensor) -> None:
        nonlocal advantages_B
        advantages_B = found_B

    for rows in steps.rows:
        batch = RankBatch.from_row(rows[rank])
        check_batch(batch, progress, steps.max_staleness)
        figures.append(learner.train(batch, show_advantages=keep))
        version = next_version(progress.policy_version)
        progress = Progress(step=progress.step + 1, policy_version=version)
    return TrainedAgain(figures, advantages_B.tolist())
