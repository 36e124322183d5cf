"""What a checkpoint takes of the rollout side: responses under way, groups that wait, figures.

Invariants, kept by `capture`:
    * Each group is in the capture once. While worker and buffer are looked at nothing goes from one
      to the other, so that both sides, and the sum of their ledgers, are of one moment.
    * Generation, rewards and syncs go on; what is looked at is frozen, and laid out in a thread.
    * The journals of both have begun their epoch, in their files, before anybody has the capture: a
      death that follows at once finds the step under way, and what had come from the engines.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ray_apr.core.sample import Sample
from ray_apr.data.resumption import Counters, RolloutSummary
from ray_apr.data.saved_samples import samples_table
from ray_apr.data.store import opened, put
from ray_apr.rollout.notes import Notes
from ray_apr.rollout.sessions import Sessions
from ray_apr.scheduling.intake import SchedulerState
from ray_apr.scheduling.scheduler import Scheduler
from ray_apr.scheduling.stock import BufferStats


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutCapture:
    """The rollout side at one moment."""

    summary: RolloutSummary
    stats: BufferStats
    state: SchedulerState
    """Without its groups."""
    samples: tuple[Any, ...]
    """One ObjectRef, of the table of all samples (`saved_samples`)."""
    epoch: int
    """Of the journal, that follows it."""
    before: Counters
    """What the run had counted before worker and buffer began."""


async def capture(
    scheduler: Scheduler,
    sessions: Sessions,
    notes: Notes,
    buffer: Any,
    summarize: Callable[[], RolloutSummary],
    before: Counters,
) -> RolloutCapture:
    """Look at the whole rollout side.

    Waits for: groups on their way to the buffer, its answer, then the journal's file. Unblocked
    by: these, or its death.

    Args:
        scheduler: Of the worker.
        sessions: Of the worker.
        notes: Of the worker.
        buffer: Handle of the sample buffer.
        summarize: Gives the figures of the worker.
        before: What the run had counted before worker and buffer began.
    """
    async with sessions.hand_overs_held():
        epoch = notes.next_epoch()
        stats, refs = await buffer.held.remote(epoch)
        summary, state = summarize(), scheduler.state()
        notes.begin_epoch(epoch)
        waiting = tuple(sessions.on_their_way.values())
    await notes.flush()
    samples = await asyncio.to_thread(_table, state.groups, refs, waiting)
    return RolloutCapture(
        summary=summary,
        stats=stats,
        state=dataclasses.replace(state, groups=()),
        samples=(samples,),
        epoch=epoch,
        before=before,
    )


def _table(
    live: Sequence[Sequence[Sample]], refs: Sequence[Any], waiting: Sequence[Sequence[Sample]]
) -> Any:
    """An ObjectRef of all samples as one table; those of the buffer as they were carried.

    Waits for: the buffer's samples. Unblocked by: the object store, or the error of what it has
    lost.
    """
    held: list[Sequence[Sample]] = opened(refs)
    return put(samples_table(live, (*held, *waiting)))
