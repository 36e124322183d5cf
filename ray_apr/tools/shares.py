"""Where the time of a run went: its trainer's, its engines', and what the trainer waited for.

The first `FILLING_STEPS` steps of each part of the run are left out, in which engines fill and both
sides compile; so is what lies between the parts.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from ray_apr.core.exceptions import ConfigError
from ray_apr.tools.report.load import Row, RunData
from ray_apr.tools.report.parts import (
    FILLING_STEPS,
    left_out,
    parts_of,
    seconds_of,
    steady_steps,
)
from ray_apr.tools.report.summary import covered_s, share_of, spans_of

_FEWEST = 4
"""Steps after them of which shares of time say something."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """What the trainer waited for the batch of one step."""

    before: Row
    """Row of the step before, whose end is the begin of the wait."""
    seconds: float
    has_batch: bool
    """Whether a whole batch lay in the buffer already: the wait is its hand-over. False where the
    rows do not tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """What trainer and engines did in the steps that are looked at, as shares of their time."""

    seconds: float
    """From the end of the steps that are left out to that of the last one, of all parts."""
    waits: Sequence[Wait]
    """One a step."""
    trains: float
    syncs: float
    """The trainer is in weight syncs, or waits for one to end."""
    starves: float
    """The trainer waits for samples."""
    handed: float
    """The trainer waits although a whole batch lies in the buffer."""
    saves: float
    """The trainer copies a checkpoint, or waits for the one before to be durable."""
    generates: float
    """Mean of the engines, as are the next two."""
    paused: float
    idle: float

    def told(self, share: float) -> str:
        """A share of the time, and its seconds."""
        return f"{share:.0%} ({share * self.seconds:.1f} s)"


def shares_of(run: RunData) -> Shares:
    """Where the time went.

    Raises:
        ConfigError: If the run has too few steps, or no timeline.
    """
    rows = steady_steps(run)
    if len(rows) < _FEWEST:
        raise _too_few(run)
    if not run.timeline:
        raise ConfigError("RUN_DIR", str(run.path), "has no timeline.jsonl, which says who waited")
    steady = [part.steps[FILLING_STEPS - 1 :] for part in parts_of(run) if part.steady]
    waits = _waits(steady)
    windows = [(of_part[0]["time_s"], of_part[-1]["time_s"]) for of_part in steady]
    length_s = seconds_of(windows)
    saved = spans_of(run, "trainer", "checkpoint")
    generates, paused = (share_of(run, what, windows) or 0.0 for what in ("generate", "paused"))
    return Shares(
        seconds=length_s,
        waits=waits,
        trains=_seconds(rows, "trainer_step_s") / length_s,
        # which follows a step's end: that of the last one is beyond the window
        syncs=_seconds([wait.before for wait in waits], "weight_wait_s") / length_s,
        starves=sum(wait.seconds for wait in waits if not wait.has_batch) / length_s,
        handed=sum(wait.seconds for wait in waits if wait.has_batch) / length_s,
        saves=sum(covered_s(saved, window) for window in windows) / length_s,
        generates=generates,
        paused=paused,
        idle=max(0.0, 1.0 - generates - paused),
    )


def _too_few(run: RunData) -> ConfigError:
    """The error of a run with too few steps; it says what the last one saw the run wait for."""
    fewest = FILLING_STEPS + _FEWEST
    verb = "it takes" if run.final else "wait for"
    has = "1 step" if len(run.steps) == 1 else f"{len(run.steps)} steps"
    remedy = f"has {has}, of which nothing can be said; {verb} "
    if len(run.steps) < fewest:
        remedy += f"{fewest} of them"
    else:
        remedy += f"{_FEWEST} without {left_out(run)}, in which the engines fill"
    if run.steps and run.steps[-1].get("waiting_for"):
        remedy += f". At the end of the last one: {run.steps[-1]['waiting_for']}"
    return ConfigError("RUN_DIR", str(run.path), remedy)


def _waits(steady: Sequence[Sequence[Row]]) -> tuple[Wait, ...]:
    """Of each step; before those of a part is the one whose end is the begin of the first wait."""
    return tuple(
        Wait(before=before, seconds=_seconds([row], "trainer_wait_s"), has_batch=has_batch(before))
        for of_part in steady
        for before, row in itertools.pairwise(of_part)
    )


def has_batch(row: Row) -> bool:
    """Whether at the end of a step the buffer held the whole batch of the next one.

    What is buffered is counted from the version of the engines on, which is that of the trainer or
    older; a batch for each version between them is trained, or was the step's own.
    """
    if row.get("engines_version") is None:
        return False
    num_batches = 1 + row["policy_version"] - row["engines_version"]
    return bool(row["buffered"] >= row["num_samples"] * num_batches)


def _seconds(rows: Sequence[Row], name: str) -> float:
    return sum(row.get(name) or 0.0 for row in rows)
