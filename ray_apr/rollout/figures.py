"""What the rollout worker tells of itself: rows, gauges, and what it waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from ray_apr.core.ledger import LedgerSnapshot
from ray_apr.core.metrics import Metrics
from ray_apr.core.protocols import RolloutClient
from ray_apr.data.movement import Moves
from ray_apr.data.resumption import Counters
from ray_apr.rollout.engines import EngineWatch
from ray_apr.rollout.notes import Notes
from ray_apr.rollout.poison import Poison
from ray_apr.rollout.sessions import Sessions
from ray_apr.scheduling.live import Counts, LiveGroup
from ray_apr.scheduling.scheduler import Scheduler


class Figures:
    """Tells the run folder, the buffer and the metrics what the worker does.

    Waits for: the buffer and the recorder, which are told. Unblocked by: their answers or deaths.

    Args:
        scheduler: Of the worker.
        sessions: Of the worker.
        engines: Of the worker.
        notes: Of the worker.
        poison: Of the worker.
        buffer: Handle of the sample buffer.
        recorder: Handle of the recorder.
        metrics: Of the run.
        before: What the run had counted before this worker began.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        sessions: Sessions,
        engines: EngineWatch,
        notes: Notes,
        poison: Poison,
        *,
        buffer: Any,
        recorder: Any,
        metrics: Metrics,
        before: Counters,
    ) -> None:
        self._scheduler = scheduler
        self._sessions = sessions
        self._engines = engines
        self._notes = notes
        self._poison = poison
        self._buffer = buffer
        self._recorder = recorder
        self._metrics = metrics
        self._before = before.status
        self._recording = asyncio.Lock()
        self._dropped: list[dict[str, Any]] = []
        """Rows of groups that were dropped, until they are recorded."""

    async def show(self, client: RolloutClient) -> None:
        """Tell what the worker does and waits for at this moment.

        Args:
            client: Of the servers, which are asked for their status.
        """
        diagnosis = self._scheduler.diagnosis()
        too_old = await self._buffer.report_rollout.remote(diagnosis, self._moves())
        await self._engines.read(client)
        await self.record_ends()
        counts, room = self._scheduler.counts(), self._scheduler.room()
        ledger = self._scheduler.live.ledger.snapshot()
        self._set_gauges(counts, ledger)
        status: dict[str, Any] = {
            "inflight": counts.inflight,
            "held": counts.interrupted,
            "unscored": counts.finished,
            "stepping": counts.stepping,
            "limited_by": None if room.num_groups else room.limit,
            "buffered": counts.buffered,
            "engines_version": self._scheduler.policy_version,
            "tokens_generated": ledger.generated,
            "tokens_discarded": sum(ledger.discarded.values()) + too_old,
            "samples_interrupted": counts.interruptions_total,
            "samples_resumed": counts.resumptions_total,
            "waiting_for": diagnosis,
            "reward_s": self._sessions.scorer.mean_reward_s,
            **self._engines.load(),
        }
        status |= {name: status[name] + count for name, count in self._before.items()}
        await self._recorder.record.remote("status", status)

    def note_dropped(self, groups: Sequence[LiveGroup]) -> None:
        """Groups were dropped, and perhaps prompts left out."""
        rows = [
            {
                "group_id": group.group_id,
                "reason": group.dropped,
                "policy_version": group.oldest_version or 0,
                "num_generated": sum(sample.num_generated for sample in group.samples),
                **({"retried": True} if group.is_retried else {}),
                **({"error": group.error} if group.error else {}),
            }
            for group in groups
        ]
        rows += self._poison.take_skipped()
        self._dropped += rows
        if rows:
            self._notes.of_dropped(groups, rows)

    async def record_ends(self) -> None:
        """Record which samples have ended, which groups and prompts were given up, and when user
        code ran. All that was so at the call is recorded as this returns."""
        async with self._recording:  # another one may have rows on their way
            self.note_dropped(self._scheduler.take_dropped())
            ended, self._sessions.ended = self._sessions.ended, []
            dropped, self._dropped = self._dropped, []
            convicted, self._poison.convicted = self._poison.convicted, []
            spans = self._sessions.scorer.take_spans()
            rows_of = {"ended": ended, "dropped": dropped, "poison": convicted, "timeline": spans}
            for kind, rows in rows_of.items():
                if rows:
                    await self._recorder.record_many.remote(kind, rows)

    def _set_gauges(self, counts: Counts, ledger: LedgerSnapshot) -> None:
        """Set the metrics of what is where."""
        self._metrics.set_all(
            {
                "apr_rollout_inflight_samples": counts.inflight,
                "apr_rollout_inflight_limit_samples": self._scheduler.max_inflight,
                "apr_rollout_held_samples": counts.interrupted,
                "apr_rollout_unfinished_samples": counts.unfinished,
                "apr_rollout_unfinished_limit_samples": self._scheduler.max_unfinished,
                "apr_buffer_limit_samples": self._scheduler.max_buffered,
            }
        )
        for reason, tokens in ledger.discarded.items():
            self._metrics.raise_to("apr_rollout_discarded_tokens", tokens, reason=reason)

    def _moves(self) -> Moves:
        return Moves(
            tokens=self._engines.tokens_made,
            rewards=self._sessions.num_rewards,
            engines=self._engines.num_changes,
        )
