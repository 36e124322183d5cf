"""Where the time of a run went: its trainer's, its engines', and what the trainer waited for.

The first `FILLING_STEPS` steps are left out: in them the engines fill, and both sides compile.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from ray_apr.core.exceptions import ConfigError
from ray_apr.tools.report.load import Row, RunData
from ray_apr.tools.report.summary import covered_s, engine_names, engine_seconds, spans_of

FILLING_STEPS = 2
"""At the begin of a run, which are left out."""
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
    """From the end of the steps that are left out to that of the last one."""
    waits: Sequence[Wait]
    """One a step."""
    trains: float
    syncs: float
    """The trainer is in weight syncs, or waits for one to end."""
    starves: float
    """The trainer waits for samples."""
    handed: float
    """The trainer waits although a whole batch lies in the buffer."""
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
    num_steps = len(run.steps)
    if num_steps < FILLING_STEPS + _FEWEST:
        raise ConfigError(
            "RUN_DIR",
            str(run.path),
            f"has {num_steps} steps, of which nothing can be said yet; wait for "
            f"{FILLING_STEPS + _FEWEST} of them",
        )
    if not run.timeline:
        raise ConfigError("RUN_DIR", str(run.path), "has no timeline.jsonl, which says who waited")
    rows, waits, engines = run.steps[FILLING_STEPS:], _waits(run), engine_names(run)
    window = (run.steps[FILLING_STEPS - 1]["time_s"], run.steps[-1]["time_s"])
    length_s = window[1] - window[0]
    of_engines_s = engine_seconds(run, len(engines), window)
    generates, paused = (
        sum(covered_s(spans_of(run, name, what), window) for name in engines) / of_engines_s
        if engines
        else 0.0
        for what in ("generate", "paused")
    )
    return Shares(
        seconds=length_s,
        waits=waits,
        trains=_seconds(rows, "trainer_step_s") / length_s,
        syncs=_seconds(rows, "weight_wait_s") / length_s,
        starves=sum(wait.seconds for wait in waits if not wait.has_batch) / length_s,
        handed=sum(wait.seconds for wait in waits if wait.has_batch) / length_s,
        generates=generates,
        paused=paused,
        idle=max(0.0, 1.0 - generates - paused),
    )


def _waits(run: RunData) -> tuple[Wait, ...]:
    steps = itertools.pairwise(run.steps[FILLING_STEPS - 1 :])
    return tuple(
        Wait(before=before, seconds=_seconds([row], "trainer_wait_s"), has_batch=has_batch(before))
        for before, row in steps
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
