"""What the engines say of themselves: figures, spans of the timeline, how much each can take.

Invariants, kept by `EngineWatch`:
    * An engine that has told its status once keeps one; `read_last` gives one that has died the
      tokens that have come from it.
    * Tokens that a worker got which was here before are none of this one's.
    * An engine that has left keeps what it said last: nothing that was asked earlier replaces it.
    * That no engine runs is an error once they have not come again for `start_limit_s`, or are gone
      again and again while no version is trained; until then it is a wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ray_apr.core.exceptions import (
    EngineUnavailableError,
    NoEngineError,
    RolloutError,
    one_line,
)
from ray_apr.core.messages import Generation, ServerStatus
from ray_apr.core.metrics import Metrics
from ray_apr.core.protocols import RolloutClient
from ray_apr.scheduling.limits import Limits
from ray_apr.scheduling.routing import AdaptiveLimit, that_stay
from ray_apr.scheduling.suspects import CONVICTED

logger = logging.getLogger(__name__)

_END_PAUSE_S = 0.5
_END_TRIES = 40
"""Times that calls are aborted until no more tokens come of them."""
_TAKE_OVER_S = 180.0
"""Longest that an engine may not answer a worker that follows a dead one."""
_ANY_S = 5.0
"""Longest that a call waits for an engine to come again; the caller calls again."""
_MOST_OUTAGES = 2 * CONVICTED
"""Times that all engines may be gone without a new version between: one prompt may end them
`CONVICTED` times."""


class EngineWatch:
    """Last status of each engine, and limits that adapt to it.

    Args:
        limits: Their limit of samples in flight is the sum of the engines', where they adapt.
        recorder: Handle of the recorder; gets the spans.
        metrics: Gets the gauges.
        is_adaptive: Whether the limits adapt.
        start_limit_s: How long no engine may run; 0 where none can be started beside the trainer.
    """

    def __init__(
        self,
        limits: Limits,
        recorder: Any,
        metrics: Metrics,
        *,
        is_adaptive: bool,
        start_limit_s: float = 0.0,
    ) -> None:
        self._scheduled = limits
        self._recorder = recorder
        self._metrics = metrics
        self._is_adaptive = is_adaptive
        self._first_limit = limits.max_inflight
        """Of all engines together, before anything is known of them."""
        self._limits: dict[str, AdaptiveLimit] = {}
        self._statuses: dict[str, ServerStatus] = {}
        self._received: Counter[str] = Counter()
        """Tokens that have come from each engine."""
        self._before: Counter[str] = Counter()
        """Tokens that had come from each engine before this worker was there."""
        self._lost: Counter[str] = Counter()
        """Tokens that each engine had handed out by then, and that nobody noted."""
        self._left: set[str] = set()
        """Engines that have left, and whose last figures are known."""
        self.version_found = 0
        """Newest policy version of those that were taken over."""
        self._states: frozenset[tuple[str, int, bool]] = frozenset()
        self._is_silent = False
        self._start_limit_s = start_limit_s
        self._any_run = asyncio.Event()
        """Whether an engine runs, as far as is known."""
        self._any_run.set()
        self._none_since = 0.0
        self._num_outages = 0
        """Times that none ran since the last new version."""
        self._running: Sequence[ServerStatus] = ()
        """What those said that answered last and stay."""
        self.num_changes = 0
        """Times that engines came, went, paused, resumed or got new weights, and that they were
        looked for while none ran: their start has a limit of its own."""

    @property
    def statuses(self) -> tuple[ServerStatus, ...]:
        """What each engine said last, in the order in which they were first seen."""
        return tuple(self._statuses.values())

    @property
    def tokens_made(self) -> int:
        """Tokens that all engines have made, those of calls under way included."""
        return sum(status.tokens_made for status in self._statuses.values())

    def load(self) -> dict[str, float]:
        """What engines have spent their time on, in seconds of all of them: sums that only grow."""
        statuses = self._statuses.values()
        return {
            "engines_busy_s": round(sum(status.busy_s for status in statuses), 3),
            "engines_idle_s": round(sum(status.idle_s for status in statuses), 3),
            "engines_request_s": round(sum(status.request_s for status in statuses), 3),
            "engines_tokens": self.tokens_made,
        }

    @property
    def received(self) -> dict[str, int]:
        """Tokens that have come from each engine, to this worker and those before it."""
        return dict(self._before + self._lost + self._received)

    async def take_over(self, client: RolloutClient, received: Mapping[str, int]) -> int:
        """End what engines do for a worker that is dead. Dead ones do nothing any more; one that
        does not answer is waited for, as it answers again or Serve replaces it.

        Waits for: the ends of its calls. Unblocked by: these, or `_END_TRIES` pauses;
        `_TAKE_OVER_S` for an engine that does not answer.

        Args:
            client: Of the servers.
            received: Tokens that it had from each engine.

        Returns:
            Tokens that they handed out and it did not note.

        Raises:
            RolloutError: If one that lives does not answer in time.
        """
        statuses: Sequence[ServerStatus] = ()
        before, tries, deadline = -1, 0, time.monotonic() + _TAKE_OVER_S
        while tries < _END_TRIES:
            try:
                await client.abort(None)
                await asyncio.sleep(_END_PAUSE_S)
                statuses = await client.status(drain=False)
            except NoEngineError:  # nothing comes from the dead
                statuses = ()
            except RolloutError as error:
                if time.monotonic() > deadline:
                    raise
                logger.warning("engines are not taken over yet: %s", one_line(error))
                await asyncio.sleep(_END_PAUSE_S)
                continue
            tries += 1
            now = sum(status.tokens_generated for status in statuses)
            if now == before:
                break
            before = now
        versions = (status.policy_version for status in statuses if status.weights_valid)
        self.version_found = max(versions, default=0)
        handed_out = {status.replica_id: status.tokens_generated for status in statuses}
        self._before = Counter({name: received.get(name, 0) for name in handed_out})
        self._lost = Counter({name: n - self._before[name] for name, n in handed_out.items()})
        return self._lost.total()

    def count_received(self, replica_id: str, num_tokens: int) -> None:
        """Tokens have come from an engine."""
        self._received[replica_id] += num_tokens

    def count_late(self, generation: Generation) -> None:
        """Tokens have come from an engine, of a call that had been given up."""
        self.count_received(generation.replica_id, generation.num_tokens)
        self._scheduled.live.ledger.lose(generation.num_tokens)

    async def read(self, client: RolloutClient) -> set[str]:
        """Ask all servers for their status and record what they did since the last time.

        Waits for: the servers, then the recorder. Unblocked by: their answers or deaths; the client
        has a limit.

        Returns:
            Ids of the replicas that answered; none where one that lives is too slow to.

        Raises:
            NoEngineError: See `check_any`.
        """
        try:
            statuses = await client.status()
        except NoEngineError as error:
            self._running = ()
            self.check_any(error)
            return set()
        except RolloutError as error:  # no answer for now; Serve replaces what never answers
            self._found_any()
            if not self._is_silent:
                logger.warning("the engines' figures are missing: %s", one_line(error))
            self._is_silent = True
            return set()
        self._is_silent = False
        statuses = [status for status in statuses if status.replica_id not in self._left]
        try:
            self._running = that_stay(statuses)
            self._found_any()
        except NoEngineError as error:  # their figures are told, though nothing runs on them
            self._running = ()
            self.check_any(error)
        self._note_changes(statuses)
        if self._is_adaptive:
            self._adapt(client, self._running)
        await self._record(statuses)
        return {status.replica_id for status in statuses}

    def _found_any(self) -> None:
        if not self._any_run.is_set():
            logger.warning("an engine runs after %.0f s", time.monotonic() - self._none_since)
            self._any_run.set()

    def check_any(self, error: NoEngineError) -> None:
        """Note that no engine runs.

        Args:
            error: What says so.

        Raises:
            NoEngineError: If that has been so for too long, or too often.
        """
        now = time.monotonic()
        if self._any_run.is_set():
            self._any_run.clear()
            self._none_since = now
            self._num_outages += 1
            logger.warning("%s; they are waited for", one_line(error))
        self.num_changes += 1
        if not self._start_limit_s:
            raise error
        if now - self._none_since >= self._start_limit_s:
            raise NoEngineError(
                f"{one_line(error)}, and none has come within {self._start_limit_s:g} s "
                "(rollout.engine.start_timeout_s)"
            )
        if self._num_outages > _MOST_OUTAGES:
            raise NoEngineError(
                f"{one_line(error)}, for the {self._num_outages}th time without a step between"
            )

    async def wait_for_any(self) -> None:
        """Wait until an engine runs, for a while.

        Waits for: `read`, which finds one. Unblocked by: that, or `_ANY_S`.
        """
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._any_run.wait(), _ANY_S)

    def on_version(self) -> None:
        """The engines have a new version."""
        self._num_outages = 0

    def lack(self, policy_version: int) -> bool:
        """Whether engines run, and none of them takes requests of a version: those that Serve has
        started again have the base model."""
        running = [s for s in self._running if not s.is_lost]
        return bool(running) and not any(s.takes_requests(policy_version) for s in running)

    async def let_go(self, statuses: Sequence[ServerStatus]) -> None:
        """Take the last statuses of engines that have left."""
        self._left |= {status.replica_id for status in statuses}
        await self._record(statuses)

    async def _record(self, statuses: Sequence[ServerStatus]) -> None:
        """Keep what engines say, and show it.

        Waits for: the recorder. Unblocked by: its answer or its death.
        """
        spans: list[dict[str, Any]] = []
        steps: list[dict[str, Any]] = []
        for status in statuses:
            made = status.tokens_generated - self._before[status.replica_id]
            self._statuses[status.replica_id] = replace(
                status, spans=(), steps=(), tokens_generated=made
            )
            self._metrics.set(
                "apr_server_running_requests", status.num_running, replica=status.replica_id
            )
            self._count_activity(status)
            actor = f"engine-{list(self._statuses).index(status.replica_id)}"
            spans.extend(
                {"actor": actor, "what": what, "start_s": start, "end_s": end}
                for what, start, end in status.spans
            )
            steps.extend({"actor": actor, **row} for row in status.steps)
        for kind, rows in (("timeline", spans), ("engine_step", steps)):
            if rows:
                await self._recorder.record_many.remote(kind, rows)

    def _count_activity(self, status: ServerStatus) -> None:
        """Show what the engine has spent its time on."""
        seconds = {"generate": status.busy_s, "paused": status.paused_s, "idle": status.idle_s}
        for activity, total in seconds.items():
            self._metrics.raise_to(
                "apr_server_activity_seconds", total, replica=status.replica_id, activity=activity
            )

    def _note_changes(self, statuses: Sequence[ServerStatus]) -> None:
        states = frozenset((s.replica_id, s.policy_version, s.is_paused) for s in statuses)
        self.num_changes += states != self._states
        self._states = states

    async def read_last(self, client: RolloutClient) -> None:
        """Read the last figures; of an engine that has died, what has come from it."""
        alive = set()
        try:
            alive = await self.read(client)
        except EngineUnavailableError as error:
            logger.warning("no rollout server tells its last figures: %s", error)
        for replica_id in self._statuses.keys() - alive - self._left:
            status = self._statuses[replica_id]
            tokens = self._received[replica_id] + self._lost[replica_id]
            self._statuses[replica_id] = replace(status, tokens_generated=tokens)

    def _adapt(self, client: RolloutClient, statuses: Sequence[ServerStatus]) -> None:
        """Adapt how many requests each engine gets to what it reports."""
        if not statuses:
            return
        for status in statuses:
            begin = -(-self._first_limit // len(statuses))
            limit = self._limits.setdefault(status.replica_id, AdaptiveLimit(begin))
            before = self._statuses.get(status.replica_id, status)
            limit.observe(
                num_running=status.num_running - status.num_queued,
                num_queued=status.num_queued,
                kv_usage=status.kv_usage,
                num_preempted=status.num_preempted - before.num_preempted,
                num_ended=status.num_ended - before.num_ended,
                is_starved=self._scheduled.is_starved,
            )
        limits = {s.replica_id: self._limits[s.replica_id].limit for s in statuses}
        client.set_limits(limits)
        self._scheduled.max_inflight = max(1, sum(limits.values()))
