"""The rollout worker's side of the journal: what happens to samples, as it happens.

Invariants, kept by `Notes`:
    * Tokens are noted in the moment in which the ledger counts them, so that both say the same.
    * A group is in the file before the buffer has it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ray_apr.core.sample import Sample
from ray_apr.data.journal import WORKER_GATHER_S, Journal, JournalFolder
from ray_apr.data.prompts import PromptSource
from ray_apr.data.resumption import Counters
from ray_apr.rollout.engines import EngineWatch
from ray_apr.scheduling.live import LiveGroup, LiveSample
from ray_apr.scheduling.scheduler import Scheduler

logger = logging.getLogger(__name__)


class Notes:
    """What the rollout worker writes into the journal.

    Args:
        folder: Where the journal is; None: nothing is noted.
        epoch: Number of its first epoch.
        header: What the run's samples are made with.
        scheduler: Of the worker, with what the run goes on with.
        prompts: Of the worker.
        engines: Of the worker.
        before_frame: Called before a frame is taken; it may have more to note.
    """

    def __init__(
        self,
        folder: JournalFolder | None,
        epoch: int,
        header: Mapping[str, Any],
        *,
        scheduler: Scheduler,
        prompts: PromptSource,
        engines: EngineWatch,
        before_frame: Callable[[], None],
    ) -> None:
        self._folder = folder
        self._scheduler = scheduler
        self._prompts = prompts
        self._engines = engines
        self._before_frame = before_frame
        self._last_epoch = epoch
        self._counted = Counters()
        """Until the epoch began."""
        live = [member.sample for group in scheduler.live.groups for member in group.members]
        self._journal = Journal(
            folder,
            "worker",
            epoch,
            header=header,
            state=self._state,
            gather_s=WORKER_GATHER_S,
            known={s.sample_id: s.num_tokens if s.num_generated else 0 for s in live},
        )
        for sample in live:
            if not sample.num_generated:  # the journal may have tokens of it that were given up
                self._journal.note_samples((), sample)

    def next_epoch(self) -> int:
        """Number of the epoch that a checkpoint begins. None is given twice: the buffer may have
        begun one whose checkpoint was then not taken."""
        self._last_epoch += 1
        return self._last_epoch

    def begin_epoch(self, epoch: int) -> None:
        """A checkpoint is taken at this moment; `flush` has to follow before anybody uses it: the
        next worker may have no other figures of what came from the engines."""
        self._journal.begin_epoch(epoch)
        self._counted = self._counters()

    async def drop_before(self, epoch: int) -> None:
        """Remove what no checkpoint that is kept goes on with.

        Waits for: the file system. Unblocked by: its answer.

        Args:
            epoch: The oldest one that stays.
        """
        if self._folder is None:
            return
        try:
            await asyncio.to_thread(self._folder.drop_before, epoch)
        except OSError as error:
            logger.warning("files of the journal are not removed: %s", error)

    def of(self, live: LiveSample) -> None:
        """A sample has changed."""
        self._journal.note_samples(live.group.samples, live.sample)
        self._journal.soon()

    def of_cut(self, live: LiveSample) -> None:
        """A sample may have lost its tokens, as where a new version begins it anew."""
        if self._journal.num_noted(live.sample_id) > live.sample.num_tokens:
            self.of(live)

    def of_cuts(self) -> None:
        """Any sample may have."""
        for live in (member for group in self._scheduler.live.groups for member in group.members):
            self.of_cut(live)

    def of_admitted(self, groups: Sequence[LiveGroup]) -> None:
        """Groups were admitted; those of new prompts follow from the position."""
        again = [group.group_id for group in groups if group.prompt.num_retries]
        if again:
            self._journal.note(admitted=again)

    def of_dropped(self, groups: Sequence[LiveGroup], rows: Sequence[Mapping[str, Any]]) -> None:
        """Groups were dropped; rows are those of the run folder."""
        self._journal.note(gone=list(rows))
        for group in groups:
            self._journal.forget(group.samples)
        self._journal.soon()

    async def hand_over(self, group: Sequence[Sample]) -> None:
        """Wait until a group that goes to the buffer is in the file."""
        self._journal.note(handed=[group[0].group_id])
        self._journal.forget(group)
        await self._journal.flush()

    def soon(self) -> None:
        """Have the figures of the moment written."""
        self._journal.soon()

    async def flush(self) -> None:
        """Wait until all is in the file."""
        await self._journal.flush()

    def _state(self) -> dict[str, Any]:
        self._before_frame()
        state = self._scheduler.state(with_groups=False)
        return {
            "position": self._prompts.position,
            "retries": list(state.retries),
            "num_long_retries": state.num_long_retries,
            "num_stops": state.num_stops,
            "num_owed": state.num_owed,
            "version": self._scheduler.policy_version,
            "received": self._engines.received,
            "counters": dataclasses.asdict(self._counters() - self._counted),
        }

    def _counters(self) -> Counters:
        counts, ledger = self._scheduler.counts(), self._scheduler.live.ledger.snapshot()
        return Counters(
            samples_interrupted=counts.interruptions_total,
            samples_resumed=counts.resumptions_total,
            tokens_generated=ledger.generated,
            tokens_discarded=ledger.discarded,
        )
