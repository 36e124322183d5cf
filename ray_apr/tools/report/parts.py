"""The parts of a run: one, and one more for each time that it was gone on with.

The times of its rows go on from the end of the part before, so that the start of a part, in which
neither side can do anything, lies between. A part trains from the trainer's first span after
loading and compiling, or from when its engines are ready, whichever is later; to its last step, or,
where another part follows and it had not come to its own end, to the end of what it recorded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ray_apr.tools.report.load import Row, RunData

FILLING_STEPS = 2
"""At the begin of a part: engines fill, and both sides compile, so that times leave them out."""

Window = tuple[float, float]
"""Begin and end, in seconds since the run began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A run from a start of its actors to their end."""

    begin_s: float
    end_s: float
    """Begin of the next part; infinite without one."""
    steps: Sequence[Row]
    """Those of its steps that no later part has trained again."""
    window: Window | None
    """When it trained; None if it came to nothing."""

    @property
    def steady(self) -> Sequence[Row]:
        """Its steps after those in which the engines fill."""
        return self.steps[FILLING_STEPS:]


def parts_of(run: RunData) -> tuple[Part, ...]:
    """The parts of a run, in order."""
    resumes = sorted(run.resumes, key=lambda row: row["time_s"])
    begins = [0.0, *(row["time_s"] for row in resumes)]
    ends = [*begins[1:], math.inf]
    # the next one trains further steps: it had no other ones to train
    is_whole = [row.get("ended") == "ok" and not row.get("steps_repeated") for row in resumes]
    first = [0, *(row["step"] for row in resumes)]
    steps: list[list[Row]] = [[] for _ in begins]
    for row in run.steps:
        of_part = max(i for i, step in enumerate(first) if step <= max(row["step"], 0))
        steps[of_part].append(row)
    return tuple(
        Part(begin_s=begin, end_s=end, steps=rows, window=_window(run, begin, end, rows, whole))
        for begin, end, rows, whole in zip(begins, ends, steps, [*is_whole, True], strict=True)
    )


def training_windows(run: RunData) -> tuple[Window, ...]:
    """When a run trained, a window for each part that did; none without a step."""
    if not run.steps:
        return ()
    return tuple(part.window for part in parts_of(run) if part.window is not None)


def seconds_of(windows: Sequence[Window]) -> float:
    """Length of all windows together, in seconds."""
    return sum(end - start for start, end in windows)


def setup_s(run: RunData) -> float | None:
    """Until the engines generated, in all parts together; None if the run does not tell it."""
    last: float | None = (run.final or {}).get("setup_s")
    if last is None:
        return None
    *before, _ = parts_of(run)
    starts = (part.end_s if part.window is None else part.window[0] for part in before)
    return last + sum(start - part.begin_s for start, part in zip(starts, before, strict=True))


def steady_steps(run: RunData) -> list[Row]:
    """Steps of all parts, without those in which the engines fill."""
    return [row for part in parts_of(run) for row in part.steady]


def left_out(run: RunData) -> str:
    """Which steps these are, for a person."""
    num_parts = len(parts_of(run))
    of_each = "" if num_parts == 1 else f" of each of its {num_parts} parts"
    return f"the first {FILLING_STEPS}{of_each}"


def _window(
    run: RunData, begin: float, end: float, steps: Sequence[Row], is_whole: bool
) -> Window | None:
    """When a part trained; one that is whole did so until its last step."""
    is_last = math.isinf(end)
    spans = [row for row in run.timeline if begin <= row["start_s"] < end]
    generating = [row["start_s"] for row in spans if row["what"] == "generate"]
    at_work = [
        row["start_s"]
        for row in spans
        if row["actor"] == "trainer" and row["what"] not in ("load", "compile")
    ]
    if not steps and (is_whole or not generating or not at_work):
        return None
    until = steps[-1]["time_s"] if is_whole else end
    first_end = steps[0]["time_s"] if steps else until
    took = sum(steps[0].get(k) or 0.0 for k in ("trainer_wait_s", "trainer_step_s")) if steps else 0
    start = max(begin, min(at_work, default=first_end - took))
    ready = (run.final or {}).get("setup_s") if is_last else None
    # of a part that could not say it: its servers were ready when one generated
    ready_at = min(generating, default=begin) if ready is None else begin + ready
    if ready_at < first_end:
        start = max(start, ready_at)
    return (start, until) if until > start else None
