"""What a person sees while a run goes on: a line for each step and evaluation, one while nothing
moves, and warnings of groups that failed.

They are plain lines, in a terminal too: Ray's log handlers and other processes write to the same
terminal, and a live bar (tried with rich) overwrote six of seven such lines.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from ray_apr.run.evaluations import evaluation_line, evaluations_of
from ray_apr.run.failed_groups import FailedGroups

logger = logging.getLogger(__name__)

_QUIET_S = 10.0
"""A run that shows no step for this long shows what it waits for."""
_ANSWER_S = 30.0
"""Longest time beyond that until the recorder answers."""


def unbroken(show: Callable[[str], None]) -> Callable[[str], None]:
    """What takes lines of a run that goes on, or ends as it should, where nobody reads them any
    more: Ctrl-C ends what a terminal pipes them to, too. The first one that is lost is told."""
    is_told = False

    def say(line: str) -> None:
        nonlocal is_told
        try:
            show(line)
        except OSError as error:
            level = logging.DEBUG if is_told else logging.WARNING
            logger.log(level, "a line of progress is lost, and the run goes on: %r", error)
            is_told = True

    return say


@contextlib.contextmanager
def follow_progress(
    recorder: Any, folder: Path, num_steps: int, show: Callable[[str], None], num_seen: int = 0
) -> Iterator[Callable[[], None]]:
    """Show lines in a thread, which has ended after the block: Ray ends the process, with exit code
    1, if a thread still calls it after ``ray.shutdown``.

    Args:
        recorder: Handle of the `RunRecorder` actor; its death ends the thread at once.
        folder: The run folder; its evaluations and failures until now are not shown.
        num_steps: Steps of the whole run.
        show: Takes one line.
        num_seen: Steps that the run folder holds already.

    Yields:
        What has it show no more, but for evaluations and failures that have come meanwhile.
    """
    stop, evaluations = threading.Event(), evaluations_of(folder)
    failed = FailedGroups(folder)
    evaluations.new()

    def show_others() -> None:
        for row in evaluations.new():
            show(evaluation_line(row))
        for warning in failed.warnings():
            show(warning)

    def follow() -> None:
        """Consumes: steps of the recorder. Waits for: a step. Unblocked by: the recorder, or
        `_QUIET_S`. Produces: lines."""
        seen, first, since = num_seen, None, time.monotonic()
        num_trained = num_seen  # more than there are rows where it began with another run's steps
        while not stop.is_set():
            try:
                steps, status = ray.get(
                    recorder.follow.remote(seen, _QUIET_S), timeout=_QUIET_S + _ANSWER_S
                )
            except RayError:
                return  # the recorder is gone: the run ends, and its own error says why
            if stop.is_set():
                return
            seen += len(steps)
            first = first or next(iter(steps), None)
            for row in steps:
                show(step_line(row, num_steps, first))
                num_trained = row["step"] + 1
            show_others()
            if steps:
                since = time.monotonic()
            else:
                if num_trained >= num_steps:  # nobody waits any more, as the rollout side does
                    status.pop("waiting_for", None)
                show(status_line(status, time.monotonic() - since))

    thread = threading.Thread(target=follow, name="progress", daemon=True)
    thread.start()
    try:
        yield stop.set
    finally:
        stop.set()
        thread.join(timeout=_QUIET_S + _ANSWER_S)
        if not thread.is_alive():
            show_others()


def step_line(
    row: Mapping[str, Any], num_steps: int, first: Mapping[str, Any] | None = None
) -> str:
    """One step in one line: learning, age of the data, speed, where the time went, the queues.

    Args:
        row: Of the step.
        num_steps: Of the whole run.
        first: An earlier step, since which tokens a second are told: the start of the run is
            before it. None: they are not told.
    """
    time_s, speed = row["time_s"], ""
    if first is not None and time_s > first["time_s"]:
        tokens = row.get("tokens_generated", 0) - first.get("tokens_generated", 0)
        speed = f" │ {tokens / (time_s - first['time_s']):,.0f} tok/s"
    return (
        f"step {row['step'] + 1:>4}/{num_steps}"
        f" │ reward {row['reward_mean']:.3f}"
        f" │ staleness {row['staleness_mean']:.2f} max {row['staleness_max']}"
        f" │ length {row['response_tokens_mean']:.0f} max {row['response_tokens_max']}"
        f"{speed}"
        f" │ wait {row['trainer_wait_s']:.2f} train {row['trainer_step_s']:.2f}"
        f" sync {row.get('weight_wait_s', 0.0):.2f} s"
        f" │ in flight {row.get('inflight', 0)} held {row.get('held', 0)}"
        f" buffered {row.get('buffered', 0)}"
        f" │ {time_s:.0f} s"
    )


def status_line(status: Mapping[str, Any], waited_s: float) -> str:
    """What a run is waiting for that shows no step.

    Args:
        status: What the rollout worker told last, and what the parts do that start or end.
        waited_s: Seconds since the last step, or since the start.
    """
    parts = [f"{part} {doing}" for part, doing in status.get("doing", {}).items()]
    waiting_for = "; ".join(filter(None, (", ".join(parts), status.get("waiting_for"))))
    return f"… waiting for {waited_s:.0f} s: {waiting_for or 'the parts of the run'}"


@contextlib.contextmanager
def starts(recorder: Any, part: str) -> Iterator[None]:
    """In the block a part of the run starts, which the lines of a run that waits say.

    Args:
        recorder: Handle of the `RunRecorder` actor.
        part: Its name for a person, of several: "rollout servers".
    """
    recorder.record.remote("doing", {"part": part, "doing": "start"})
    yield
    recorder.record.remote("doing", {"part": part, "doing": ""})
