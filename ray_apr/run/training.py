"""Ray Train's side of a run: one train worker a rank, each with its stream of batches."""

from __future__ import annotations

import functools
import logging
import math
import sys
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import ray.train

from ray_apr.compat.forked.servers import runtime_env as forked_by
from ray_apr.compat.ray import begin_actors_of_train
from ray_apr.config.common import dtype_on
from ray_apr.core.imports import begin_imports
from ray_apr.data.datasource import sample_stream
from ray_apr.run.forking import TRAIN_WORKERS
from ray_apr.train.control import sync_limit_s
from ray_apr.train.spec import WorkerSpec

if TYPE_CHECKING:
    from ray_apr.run.spec import RunSpec

_COLLECTIVE_TIMEOUT_S = 600
"""Limit of a collective of the train workers, beside what a weight sync of rank 0 may take. No rank
is in one while it waits for its batch: all get theirs together, however long that takes."""


def begin_train() -> threading.Thread:
    """Begin what Ray Train needs: its actors, then the imports of `make_torch_trainer`, in the
    thread that is returned. Not at the same time: both import modules of Ray Data that import each
    other, and of two threads there one ends with an error, and the other may, too."""
    begin_actors_of_train()
    return begin_imports("ray.train.torch")


def _train(worker: WorkerSpec) -> None:
    """What a train worker runs, imported there: torch and transformers take seconds, in which the
    driver starts the engines."""
    from ray_apr.train.loop import train_loop_per_worker

    _speak_on_stdout()
    train_loop_per_worker(worker)


def _speak_on_stdout() -> None:
    """Have this train worker's stdout say what its user's code prints and what is warned of here:
    Ray Train says it on stderr, among much of its own."""
    root, told = logging.getLogger(), logging.StreamHandler(sys.stdout)
    told.addFilter(_is_told)
    for handler in root.handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.addFilter(lambda record: not _is_told(record))
    root.addHandler(told)


def _is_told(record: logging.LogRecord) -> bool:
    """Ray Train has what is printed as records of the root logger."""
    is_ours = record.name.startswith("ray_apr.")
    return record.levelno >= logging.WARNING if is_ours else record.name == "root"


def what_is_trained(spec: RunSpec) -> dict[str, Any]:
    """Fields of `LearnerSpec` that follow from the spec of a run."""
    return {
        "model": spec.model,
        "train": spec.train,
        "algorithm": spec.algorithm,
        "sampling": spec.rollout.sampling_params,
        "max_response_tokens": spec.rollout.max_response_tokens,
        "num_replicas": spec.rollout.num_replicas,
    }


def make_torch_trainer(spec: RunSpec, *, buffer: Any, **of_worker: Any) -> Any:
    """Return the ``TorchTrainer`` of a run.

    Args:
        spec: What the run is made of.
        buffer: Handle of the sample buffer.
        of_worker: Further fields of `WorkerSpec` that the spec of the run does not know.
    """
    from ray.train.torch import TorchConfig, TorchTrainer

    worker = WorkerSpec(
        **what_is_trained(spec),
        run=spec.name,
        partial_rollout=spec.partial_rollout,
        evaluation=spec.evaluation and replace(spec.evaluation, rewards={}),  # it scores nothing
        start_timeout_s=spec.rollout.engine.start_timeout_s,
        wire_dtype=dtype_on(spec.rollout.engine.device, spec.rollout.engine.dtype),
        shares_device=spec.rollout.is_colocated,
        takes_turns=spec.rollout.takes_turns,
        fence=spec.fences[1],
        buffer=buffer,
        **of_worker,
    )
    poll_s = spec.buffer.poll_timeout_s
    streams = {
        f"rank{r}": sample_stream(
            buffer, rank=r, poll_timeout_s=poll_s, name=f"{spec.name}-rank{r}"
        )
        for r in range(spec.scaling.num_workers)
    }
    runtime_env = {**forked_by(TRAIN_WORKERS), **(spec.run_config.worker_runtime_env or {})}
    start_s, sync_s = spec.rollout.engine.start_timeout_s, spec.train.weight_sync_timeout_s
    limit_s = _COLLECTIVE_TIMEOUT_S + math.ceil(sync_limit_s(sync_s, start_s))
    return TorchTrainer(
        functools.partial(_train, worker),
        torch_config=TorchConfig(backend=spec.torch_backend, timeout_s=limit_s),
        scaling_config=spec.worker_scaling,
        run_config=replace(spec.run_config, worker_runtime_env=runtime_env),
        datasets=streams,
        dataset_config=ray.train.DataConfig(datasets_to_split=[]),
    )
