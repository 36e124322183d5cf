"""Profiles of single steps: what a train worker's device and its main thread did."""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from ray_apr.core.clock import unix_s
from ray_apr.core.exceptions import APRError, one_line
from ray_apr.core.profiles import PROFILE_MARK, profile_name
from ray_apr.train.answers import CALL_TIMEOUT_S, answer_of
from ray_apr.train.spec import WorkerSpec

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def profiled(step: int, spec: WorkerSpec, rank: int) -> Iterator[None]:
    """Profile a block, if its step is one of ``train.profile_steps``, into the run folder.

    Waits for: the recorder, at the end. Unblocked by: its answer, or `CALL_TIMEOUT_S`; a profile
    that does not get there is missing, and ends nothing.

    Args:
        step: The block's step, from 0.
        spec: Of the train worker.
        rank: Of the train worker.
    """
    if step not in spec.train.profile_steps:
        yield
        return
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler, _mark(spec.started_at):
        yield
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / profile_name(step, rank)
        profiler.export_chrome_trace(str(file))
        saved = spec.recorder.save_profile.remote(file.name, file.read_bytes())
    try:
        answer_of(saved, "recorder, to write a profile", CALL_TIMEOUT_S)
    except APRError as error:
        logger.warning("no profile of step %d: %s", step, one_line(error))


@contextlib.contextmanager
def _mark(started_at: float) -> Iterator[None]:
    """A span over a block that says when it began: a profile has a clock of its own."""
    with record_function(f"{PROFILE_MARK}{unix_s() - started_at:.6f}"):
        yield
