"""The rollout worker: keeps the engines fed, scores what ends, hands whole groups to the buffer.

Invariants, kept by `RolloutWorker`:
    * The scheduler alone decides; this module does what it says, and `sessions` tells it what
      happened.
    * Every wait ends by an event or by a limit, and `stop` ends all of them.
    * No task outlives the worker; the first unexpected error stops all loops and reaches the
      trainer through the buffer, instead of leaving it to wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any

from ray_apr.config import PartialRolloutConfig, RolloutConfig
from ray_apr.core.exceptions import APRError, RolloutError
from ray_apr.core.group import num_by_version
from ray_apr.core.heap import freeze_heap
from ray_apr.core.metrics import Metrics
from ray_apr.core.protocols import RolloutClient
from ray_apr.core.sample import Prompt, Sample
from ray_apr.core.user import GroupFilter
from ray_apr.data.journal import JournalFolder
from ray_apr.data.prompts import PromptSource
from ray_apr.data.resumption import Counters, Replayed, RolloutSummary, sampled_with
from ray_apr.rollout.capture import RolloutCapture, capture
from ray_apr.rollout.engines import EngineWatch
from ray_apr.rollout.figures import Figures
from ray_apr.rollout.line import Line
from ray_apr.rollout.notes import Notes
from ray_apr.rollout.poison import Poison
from ray_apr.rollout.scoring import Scorer
from ray_apr.rollout.sessions import Sessions
from ray_apr.rollout.syncs import WeightSyncs
from ray_apr.rollout.waits import first_leaf, first_of
from ray_apr.scheduling.intake import SchedulerState
from ray_apr.scheduling.live import Counts, TurnRules
from ray_apr.scheduling.order import prompt_position
from ray_apr.scheduling.scheduler import Scheduler

logger = logging.getLogger(__name__)

_HEARTBEAT_S = 1.0
_STOP_S, _STOP_PAUSE_S, _ABORT_S = 20.0, 0.5, 5.0
_AT_ONCE = 256
"""Calls that begin between two turns of the event loop, so that thousands hold nothing else up."""


class RolloutWorker(WeightSyncs):
    """Async actor around the scheduler.

    Waits for: the buffer and the recorder, where they are told something. Unblocked by: their
    answers or deaths.

    Args:
        rollout: Sampling, limits and rewards.
        partial_rollout: When samples are started, interrupted, resumed.
        batch_size: Samples of one step.
        tokenizer: Of the model.
        make_prompts: Makes the endless prompts inside this process.
        make_client: Makes the client of the rollout servers inside this process, once they run.
        make_scorer: Makes the scorer inside this process.
        buffer: Handle of the sample buffer.
        recorder: Handle of the recorder.
        sync_timeout_s: Limit of one weight sync, without the responses that it lets end first.
        policy_version: Version that the engines start with.
        make_state: Makes, inside this process, what the run goes on with, of what gives the prompt
            of an id; None begins anew.
        poison: Rows of the dataset that are not handed out, as they kill engines.
        turns: Rules of a run with an environment; None: every sample is one turn.
        group_filter: Says of each scored group whether it may be trained; None keeps all.
        run: Name of the run, which its metrics carry.
        journal: Where the journal is; None: nothing is noted.
        epoch: Number of its first epoch.
        header: What the journal says of the run's settings.
        replayed: What it says beside the samples; None: nothing.
        before: What the run has counted so far.
    """

    def __init__(
        self,
        *,
        rollout: RolloutConfig,
        partial_rollout: PartialRolloutConfig,
        batch_size: int,
        tokenizer: Any,
        make_prompts: Callable[[], PromptSource],
        make_client: Callable[[], RolloutClient],
        make_scorer: Callable[[], Scorer],
        buffer: Any,
        recorder: Any,
        sync_timeout_s: float,
        policy_version: int = 0,
        make_state: Callable[[Callable[[str], Prompt]], SchedulerState] | None = None,
        poison: Collection[int] = (),
        turns: TurnRules | None = None,
        group_filter: GroupFilter | None = None,
        run: str = "",
        journal: JournalFolder | None = None,
        epoch: int = 0,
        header: Mapping[str, Any] | None = None,
        replayed: Replayed | None = None,
        before: Counters | None = None,
    ) -> None:
        super().__init__(partial_rollout, sync_timeout_s)
        self._config = rollout
        self._partial_rollout = partial_rollout
        self._before = before or Counters()
        self._scheduler = Scheduler(
            partial_rollout,
            batch_size=batch_size,
            group_size=rollout.group_size,
            max_inflight=partial_rollout.max_inflight_samples(batch_size),
            budgets=self._budgets,
            policy_version=policy_version,
            turns=turns,
            keeps=group_filter,
        )
        self._prompts = make_prompts()
        self._sampled = sampled_with(
            rollout,
            resets=None if turns is None else turns.resets,
            weights=self._prompts.weights,
        )
        self._not_restored: APRError | None = None
        """Why the checkpoint's samples cannot go on; raised here it would be an actor's death."""
        scored: list[tuple[Sample, ...]] = []
        if make_state is not None:
            find = self._prompts.of
            try:
                scored = self._scheduler.restore(make_state(find), find)
            except APRError as error:
                self._not_restored = error
        self._starting = asyncio.Lock()
        self._capturing = asyncio.Lock()
        self._make_client = make_client
        self._scorer = make_scorer()
        self._buffer = Line(buffer)
        self._recorder = recorder
        self._goes_on_at = policy_version if replayed is None else replayed.goes_on_at
        self._received = replayed.received if replayed and replayed.takes_over else None
        """Tokens that a worker had from each engine, which was here before and died."""
        have_weights = self._received is not None or not (policy_version or rollout.takes_turns)
        if have_weights and policy_version >= self._goes_on_at:
            self._has_weights.set()
        self._main: asyncio.Task[None] | None = None
        self._metrics = Metrics(run)
        self._engines = EngineWatch(
            self._scheduler,
            recorder,
            self._metrics,
            is_adaptive=partial_rollout.is_adaptive,
            start_limit_s=0.0 if rollout.takes_turns else rollout.engine.start_timeout_s,
        )
        self._notes = Notes(
            journal,
            epoch,
            header or {},
            scheduler=self._scheduler,
            prompts=self._prompts,
            engines=self._engines,
            before_frame=lambda: self._figures.note_dropped(self._scheduler.take_dropped()),
        )
        self._poison = Poison(self._scheduler, self._prompts, rollout, poison)
        self._poison.drop_known()
        self._sessions = Sessions(
            self._scheduler,
            rollout,
            overlap_rewards=partial_rollout.overlap_rewards,
            tokenizer=tokenizer,
            scorer=self._scorer,
            buffer=self._buffer,
            engines=self._engines,
            notes=self._notes,
            poison=self._poison,
            metrics=self._metrics,
        )
        self._figures = Figures(
            self._scheduler,
            self._sessions,
            self._engines,
            self._notes,
            self._poison,
            buffer=self._buffer,
            recorder=recorder,
            metrics=self._metrics,
            before=self._before,
        )
        self._sessions.on_their_way.update({group[0].group_id: group for group in scored})
        self._wake, self._stopping = self._sessions.wake, self._sessions.stopping

    # -- life ------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start all loops, once the servers run; it may be told twice.

        Waits for: a start that is under way. Unblocked by: its end; the driver has a limit.

        Raises:
            APRError: If the checkpoint's samples cannot go on.
        """
        if self._not_restored is not None:
            raise self._not_restored
        async with self._starting:
            if self._main is None:
                await self._start()

    async def _start(self) -> None:
        client = self._sessions.client = self._make_client()
        client.on_late = self._engines.count_late
        if self._received is not None:
            lost = await self._engines.take_over(client, self._received)
            self._scheduler.live.ledger.lose(lost)
            if self._engines.version_found > self._scheduler.policy_version:  # not written in time
                await self._on_weights(self._engines.version_found)
        self._open_syncs(client)
        freeze_heap()
        self._main = asyncio.create_task(self._run(), name="rollout")

    async def stop(self) -> RolloutSummary:
        """Abort what runs, wait for it within a limit, and return the final figures."""
        counts = self._scheduler.counts()
        self._stopping.set()
        self._wake.set()
        self._close_syncs()
        if self._main is not None:
            await self._abort_until_done(self._main)
            await self._figures.record_ends()
            await self._engines.read_last(self._client)
        self._scorer.close()
        return self._summary(counts)

    async def capture(self) -> RolloutCapture:
        """All that a checkpoint needs of this side of the run, and of the buffer.

        Waits for: another capture. Unblocked by: its end; the train worker that asks has a limit.
        """
        async with self._capturing:
            # the buffer is asked once: the trainer asks again, for another epoch of the journal
            parts = (self._scheduler, self._sessions, self._notes, self._buffer.actor)
            taken = await capture(
                *parts, lambda: self._summary(self._scheduler.counts()), self._before
            )
            await self._figures.record_ends()  # nobody reads them in the epoch before any more
            return taken

    def _summary(self, counts: Counts) -> RolloutSummary:
        prompts, state = self._prompts, self._scheduler.state()
        live = {group[0].group_id for group in state.groups}
        pending = {*live, *state.retries, *self._sessions.on_their_way}
        positions = {prompt_position(prompt_id, len(prompts)) for prompt_id in pending}
        return RolloutSummary(
            ledger=self._sessions.ledger,
            samples_interrupted=counts.interruptions_total,
            samples_resumed=counts.resumptions_total,
            prompts_position=prompts.position,
            num_prompts=len(prompts),
            pending_prompts=tuple(sorted({*prompts.pending, *positions})),
            engines=self._engines.statuses,
            sampled=self._sampled,
        )

    async def wait_until_stopped(self) -> None:
        """Return at the end of the run.

        Waits for: the end of the run. Unblocked by: `stop`; who waits learns at once of this
        process's death.
        """
        await self._stopping.wait()

    async def _abort_until_done(self, main: asyncio.Task[None]) -> None:
        """Abort again and again: a call that was just about to begin escapes the first time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STOP_S):
                while not main.done():
                    with contextlib.suppress(RolloutError, TimeoutError):  # others have answered
                        async with asyncio.timeout(_ABORT_S):
                            await self._client.abort(None)
                    await asyncio.wait({main}, timeout=_STOP_PAUSE_S)
                return
        logger.error("rollout loops did not end within %.0f s", _STOP_S)
        main.cancel()

    async def _run(self) -> None:
        """Run the loops until `stop`; an error of any of them ends all and reaches the trainer."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._follow_buffer(), name="follow-buffer")
                tasks.create_task(self._beat(), name="heartbeat")
                tasks.create_task(self._dispatch(tasks), name="dispatch")
        except BaseExceptionGroup as group:
            error = first_leaf(group)
            is_ours = isinstance(error, APRError)
            logger.error("the rollout worker stops: %r", error, exc_info=None if is_ours else error)
            reason = error if isinstance(error, APRError) else RolloutError(repr(error))
            await self._buffer.fail.remote(self._sessions.outage.before(reason))

    # -- loops -----------------------------------------------------------------------------------

    async def _dispatch(self, tasks: asyncio.TaskGroup) -> None:
        """Start and abort what the scheduler says.

        Consumes: prompts. Waits for: any event of a sample, of the buffer or of a sync. Unblocked
        by: `_wake`. Produces: a task for each generate call, and for each abort.
        """
        sessions = self._sessions
        await self._report_unfinished()  # before the buffer gets groups that are newer
        await sessions.go_on(tasks)
        if not self._has_weights.is_set():
            await first_of(self._has_weights.wait(), self._stopping.wait())
        while not self._stopping.is_set():
            self._wake.clear()
            actions = self._scheduler.tick(self._poison.next_prompt)
            self._notes.of_admitted(actions.admit)  # before any call of theirs has an outcome
            for live in actions.reset:
                tasks.create_task(sessions.reset(live), name=f"reset-{live.sample_id}")
            for number, live in enumerate(actions.start, start=1):
                tasks.create_task(sessions.generate(live), name=f"sample-{live.sample_id}")
                if number % _AT_ONCE == 0:
                    await asyncio.sleep(0)
            self._figures.note_dropped(actions.dropped)
            if actions.abort:  # engines may take their time to answer
                tasks.create_task(sessions.abort(actions.abort), name="abort")
            await self._report_unfinished()
            if not self._scheduler.live.num_unfinished:
                sessions.generated.set()
            await self._wake.wait()
        sessions.generated.set()  # nothing may wait for it any more
        if sessions.fatal is not None:
            await self._buffer.fail.remote(sessions.fatal)

    async def _report_unfinished(self) -> None:
        """Tell the buffer what is still to come, if it waits for that; also what is on its way."""
        if self._partial_rollout.on_stale == "wait":
            on_their_way = num_by_version(self._sessions.on_their_way.values())
            by_version = self._scheduler.live.num_by_version + on_their_way
            await self._buffer.report_unfinished.remote(dict(by_version))

    def _budgets(self, prompt: Prompt) -> list[int]:
        """Response tokens of a prompt's samples: the lengths of the trace if one is replayed."""
        config = self._config
        if config.replay_column is None:
            return [config.max_response_tokens]
        return [int(length) for length in prompt.row[config.replay_column]]

    async def _follow_buffer(self) -> None:
        """Tell the scheduler how full the buffer is.

        Consumes: the buffer's state. Waits for: a change of it. Unblocked by: the buffer, at the
        latest after its poll limit, or `stop`. Produces: a wake-up of `_dispatch`.
        """
        cursor = -1
        while not self._stopping.is_set():
            watch = asyncio.ensure_future(self._buffer.watch.remote(cursor))
            if not await first_of(watch, self._stopping.wait()):
                return
            cursor = (state := watch.result()).cursor
            self._scheduler.on_buffer_counts(
                num_buffered=state.num_buffered,
                num_received=state.num_received,
                trainer_version=state.trainer_version,
            )
            self._wake.set()

    async def _beat(self) -> None:
        """Once a second, show what the rollout side does and waits for.

        Consumes: counts and the servers' status. Waits for: the clock. Unblocked by: `stop`.
        Produces: gauges, timeline spans, and the diagnosis that a starved trainer reports.
        """
        while not self._stopping.is_set():
            version = self._scheduler.policy_version
            await self._figures.show(self._client)
            if version == self._scheduler.policy_version:  # else they were asked before a sync
                await self._see_to_weights(self._buffer, version)
            if self._partial_rollout.is_adaptive:
                self._wake.set()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), _HEARTBEAT_S)

    async def drop_journal_before(self, epoch: int) -> None:
        """Remove what no checkpoint that is kept goes on with."""
        await self._notes.drop_before(epoch)

    async def _on_weights(self, policy_version: int) -> None:
        """Go on under a new version."""
        if policy_version >= self._goes_on_at:
            self._has_weights.set()
        if policy_version > self._scheduler.policy_version:
            self._engines.on_version()
        self._scheduler.on_version(policy_version)
        if self._partial_rollout.restarts:
            self._notes.of_cuts()
        self._notes.soon()  # the next worker would not know the version
        self._wake.set()
