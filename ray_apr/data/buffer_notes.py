"""The buffer's side of the journal: what it decides, before anybody hears of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from ray_apr.data.journal import Journal, JournalFolder
from ray_apr.data.resumption import Counters
from ray_apr.scheduling.grant import Grant
from ray_apr.scheduling.stock import Stock


class BufferNotes:
    """What the buffer writes into the journal.

    Args:
        folder: Where the journal is; None: nothing is noted.
        epoch: Number of its first epoch.
        header: What the run's samples are made with.
        stock: Of the buffer.
    """

    def __init__(
        self,
        folder: JournalFolder | None,
        epoch: int,
        header: Mapping[str, Any] | None,
        stock: Stock,
    ) -> None:
        self._stock = stock
        self._counted = Counters()
        """Until the epoch began."""
        self._journal = Journal(folder, "buffer", epoch, header=header, state=self._state)

    def of_grant(self) -> None:
        """The trainer waits for a step or trains it, if it does."""
        grant = self._stock.granted
        if grant is not None:
            self._journal.note(granted=[grant.step, grant.policy_version])

    def of_batch(self, grant: Grant) -> None:
        """A step has its batch."""
        self._journal.note(batch=[grant.step, [group.group_id for group in grant.groups]])

    def of_evicted(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Groups were too old; rows are those of the run folder."""
        self._journal.note(gone=list(rows))

    def of_trained(self, step: int, figures: Mapping[str, float]) -> None:
        """A step is trained, and this is what the trainer is told."""
        self._journal.note(trained=[step, figures])

    def begin_epoch(self, epoch: int) -> None:
        """A checkpoint is taken at this moment; the epoch knows the step that is under way, the
        next one's batch, and those of later ones that are trained again: it holds samples that are
        newer."""
        self._journal.begin_epoch(epoch)
        self._counted = self._counters()
        self.of_grant()
        for grant in self._stock.batches:
            self.of_batch(grant)
        for step, groups in sorted(self._stock.plan.items()):
            self._journal.note(batch=[step, list(groups)])

    async def flush(self) -> None:
        """Wait until all is in the file."""
        await self._journal.flush()

    def _state(self) -> dict[str, Any]:
        return {"counters": dataclasses.asdict(self._counters() - self._counted)}

    def _counters(self) -> Counters:
        stats = self._stock.stats()
        return Counters(
            samples_trained=stats.trained_samples,
            tokens_trained=stats.ledger.trained,
            tokens_discarded=stats.ledger.discarded,
        )
