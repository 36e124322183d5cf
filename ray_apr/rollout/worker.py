"""The rollout worker: keeps the engines fed, scores what ends, hands whole groups to the buffer.

Invariants, kept by `RolloutWorker`:
    * The dispatcher alone decides; this module does what it says and reports back what happened.
    * Every wait ends by an event or by a limit, and `stop` ends all of them.
    * No task outlives the worker; the first unexpected error stops all loops and reaches the
      trainer through the buffer, instead of leaving it to wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from ray_apr.config import PartialRolloutConfig, RolloutConfig
from ray_apr.core.ledger import LedgerSnapshot
from ray_apr.core.messages import GenerateRequest
from ray_apr.data.movement import Moves
from ray_apr.data.order import prompt_position
from ray_apr.data.prompts import PromptSource, load_tokenizer
from ray_apr.exceptions import (
    APRError,
    EngineUnavailableError,
    RolloutError,
    StepError,
    UserCodeError,
    one_line,
)
from ray_apr.metrics import Metrics
from ray_apr.protocols import GroupFilter, RolloutClient
from ray_apr.rollout.dispatcher import Dispatcher
from ray_apr.rollout.engines import EngineWatch
from ray_apr.rollout.failures import FailureCount, Outage, cause_of
from ray_apr.rollout.roster import DispatcherCounts
from ray_apr.rollout.scoring import Scorer
from ray_apr.rollout.state import RolloutState, TurnRules
from ray_apr.rollout.syncs import WeightSyncs
from ray_apr.rollout.turns import encode_step
from ray_apr.types import (
    Prompt,
    RewardResult,
    Sample,
    SampleMeta,
    ServerStatus,
    Step,
)

logger = logging.getLogger(__name__)

_HEARTBEAT_S = 1.0
_RETRY_PAUSE_S = 1.0
_STOP_PAUSE_S = 0.5
_STOP_TRIES = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSummary:
    """Final figures of the rollout side."""

    ledger: LedgerSnapshot
    samples_interrupted: int
    """Times that a sample with tokens was stopped before its end."""
    samples_resumed: int
    """Times that such a sample was continued."""
    prompts_position: int
    """Prompts handed out."""
    num_prompts: int
    """Prompts of the dataset."""
    pending_prompts: tuple[int, ...]
    """Positions of those handed out that are neither in the buffer nor dropped."""
    engines: tuple[ServerStatus, ...]
    """As they were when they were last asked."""


class RolloutWorker(WeightSyncs):
    """Async actor around the dispatcher.

    Args:
        rollout: Sampling, limits and rewards.
        partial_rollout: When samples are started, interrupted, resumed.
        batch_size: Samples of one optimizer step.
        model: Folder or hub id of the tokenizer.
        make_prompts: Makes the endless prompts inside this process.
        make_client: Makes the client of the rollout servers inside this process, once they run.
        make_scorer: Makes the scorer inside this process.
        buffer: Handle of the sample buffer.
        recorder: Handle of the recorder.
        sync_timeout_s: Limit of one weight sync, without the responses that it lets end first.
        policy_version: Version that the engines start with.
        turns: Rules of a run with an environment; None: every sample is one turn.
        group_filter: Says of each scored group whether it may be trained; None keeps all.
        run: Name of the run, which its metrics carry.
    """

    def __init__(
        self,
        *,
        rollout: RolloutConfig,
        partial_rollout: PartialRolloutConfig,
        batch_size: int,
        model: str,
        make_prompts: Callable[[], PromptSource],
        make_client: Callable[[], RolloutClient],
        make_scorer: Callable[[], Scorer],
        buffer: Any,
        recorder: Any,
        sync_timeout_s: float,
        policy_version: int = 0,
        turns: TurnRules | None = None,
        group_filter: GroupFilter | None = None,
        run: str = "",
    ) -> None:
        super().__init__(partial_rollout, sync_timeout_s)
        self._config = rollout
        self._partial_rollout = partial_rollout
        self._dispatcher = Dispatcher(
            partial_rollout,
            batch_size=batch_size,
            group_size=rollout.group_size,
            max_inflight=partial_rollout.max_inflight_samples(batch_size),
            policy_version=policy_version,
        )
        self._state = RolloutState(self._dispatcher, partial_rollout, turns, group_filter)
        self._prompts = make_prompts()
        self._tokenizer = load_tokenizer(model)
        self._make_client = make_client
        self._scorer = make_scorer()
        self._buffer = buffer
        self._recorder = recorder
        self._wake = asyncio.Event()
        self._generated = asyncio.Event()
        """Set while nothing generates; only looked at where rewards do not overlap."""
        self._stopping = asyncio.Event()
        self._has_weights = asyncio.Event()
        """Set from the first sync on, before which engines may have none, or those of another
        version."""
        if policy_version == 0 and not rollout.is_colocated:
            self._has_weights.set()
        self._main: asyncio.Task[None] | None = None
        self._on_their_way: set[str] = set()
        """Prompts of groups that the buffer does not have yet."""
        self._num_calls = 0
        self._requests: dict[str, str] = {}
        """Request id of each generate call under way, by sample."""
        self._failures: dict[str, int] = {}
        self._generations = FailureCount("generations")
        self._steps = FailureCount("steps of the environment")
        self._scores = FailureCount("rewards")
        self._outage = Outage()
        self._num_rewards = 0
        """Answers of the reward function and of the environment."""
        self._fatal: RolloutError | None = None
        self._metrics = Metrics(run)
        self._engines = EngineWatch(
            self._dispatcher, recorder, self._metrics, is_adaptive=partial_rollout.is_adaptive
        )

    # -- life ------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start all loops, once the servers run; returns at once."""
        if self._main is None:
            self._open_syncs(self._make_client())
            _freeze_heap()
            self._main = asyncio.create_task(self._run(), name="rollout")

    async def stop(self) -> RolloutSummary:
        """Abort what runs, wait for it within a limit, and return the final figures."""
        counts = self._dispatcher.counts()
        self._stopping.set()
        self._wake.set()
        self._close_syncs()
        if self._main is not None:
            await self._abort_until_done(self._main)
            await self._engines.read_last(self._client)
        self._scorer.close()
        return self._summary(counts)

    async def summary(self) -> RolloutSummary:
        """Figures of this moment.

        Who asks this, and then the buffer what it holds, misses no prompt: what is on the way from
        here to there is pending.
        """
        return self._summary(self._dispatcher.counts())

    def _summary(self, counts: DispatcherCounts) -> RolloutSummary:
        prompts = self._prompts
        pending = {*self._state.pending_prompts(), *self._on_their_way}
        positions = {prompt_position(prompt_id, len(prompts)) for prompt_id in pending}
        return RolloutSummary(
            ledger=self._state.ledger(),
            samples_interrupted=counts.interruptions_total,
            samples_resumed=counts.resumptions_total,
            prompts_position=prompts.position,
            num_prompts=len(prompts),
            pending_prompts=tuple(sorted({*prompts.pending, *positions})),
            engines=self._engines.statuses,
        )

    async def wait_until_stopped(self) -> None:
        """Wait for the end of the run; who waits learns at once of this process's death."""
        await self._stopping.wait()

    async def _abort_until_done(self, main: asyncio.Task[None]) -> None:
        """Abort again and again: a call that was just about to begin escapes the first time."""
        for _ in range(_STOP_TRIES):
            with contextlib.suppress(EngineUnavailableError):  # its calls end by themselves
                await self._client.abort(None)
            done, _ = await asyncio.wait({main}, timeout=_STOP_PAUSE_S)
            if done:
                return
        logger.error("rollout loops did not end within %.0f s", _STOP_TRIES * _STOP_PAUSE_S)
        main.cancel()

    async def _run(self) -> None:
        """Run the loops until `stop`; an error of any of them ends all and reaches the trainer."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._follow_buffer(), name="follow-buffer")
                tasks.create_task(self._beat(), name="heartbeat")
                tasks.create_task(self._dispatch(tasks), name="dispatch")
        except BaseExceptionGroup as group:
            error = _first_leaf(group)
            is_ours = isinstance(error, APRError)
            logger.error("the rollout worker stops: %r", error, exc_info=None if is_ours else error)
            reason = error if isinstance(error, APRError) else RolloutError(repr(error))
            if isinstance(reason, EngineUnavailableError) and self._outage.reason:
                met = self._outage.reason.rstrip(".")
                reason = EngineUnavailableError(f"{met}; then {reason}")
            await self._buffer.fail.remote(reason)

    # -- loops -----------------------------------------------------------------------------------

    async def _dispatch(self, tasks: asyncio.TaskGroup) -> None:
        """Start and abort what the dispatcher says.

        Consumes: prompts. Waits for: any event of a sample, of the buffer or of a sync. Unblocked
        by: `_wake`. Produces: a task for each generate call.
        """
        if not self._has_weights.is_set():
            await _first_of(self._has_weights.wait(), self._stopping.wait())
        while not self._stopping.is_set():
            self._wake.clear()
            await self._abort(self._state.evict_stale())
            for _ in range(self._dispatcher.num_groups_to_start()):
                self._admit(self._state.next_retry() or self._prompts.next())
            while (sample := self._state.next_reset()) is not None:
                tasks.create_task(self._reset(sample), name=f"reset-{sample.sample_id}")
            while (sample := self._state.start_next()) is not None:
                began = self._generations.now
                generating = self._generate(sample, began)
                tasks.create_task(generating, name=f"sample-{sample.sample_id}")
            await self._abort((*self._dispatcher.to_interrupt(), *self._state.take_surplus()))
            if self._partial_rollout.on_stale == "wait":
                by_version = dict(self._dispatcher.num_by_version)
                await self._buffer.report_unfinished.remote(by_version)
            if not self._dispatcher.is_generating:
                self._generated.set()
            await self._wake.wait()
        self._generated.set()  # nothing may wait for it any more
        if self._fatal is not None:
            await self._buffer.fail.remote(self._fatal)

    def _admit(self, prompt: Prompt) -> None:
        """Take a new group in, with the lengths of the trace if one is replayed."""
        config = self._config
        longest = config.max_response_tokens
        budget: int | list[int] = longest
        if config.replay_column is not None:
            budget = [min(longest, int(length)) for length in prompt.row[config.replay_column]]
        self._state.admit(prompt, group_size=config.group_size, max_response_tokens=budget)

    async def _follow_buffer(self) -> None:
        """Tell the dispatcher how full the buffer is.

        Consumes: the buffer's state. Waits for: a change of it. Unblocked by: the buffer, at the
        latest after its poll limit, or `stop`. Produces: a wake-up of `_dispatch`.
        """
        cursor = -1
        while not self._stopping.is_set():
            watch = asyncio.ensure_future(self._buffer.watch.remote(cursor))
            if not await _first_of(watch, self._stopping.wait()):
                return
            state = watch.result()
            cursor = state.cursor
            self._dispatcher.on_buffer_counts(
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
            diagnosis = self._dispatcher.diagnosis()
            await self._buffer.report_rollout.remote(diagnosis, self._moves())
            await self._engines.read(self._client)
            if self._partial_rollout.is_adaptive:
                self._wake.set()
            counts = self._dispatcher.counts()
            ledger = self._state.ledger()
            self._show(counts, ledger)
            status = {
                "inflight": counts.inflight,
                "held": counts.interrupted,
                "buffered": counts.buffered,
                "tokens_generated": ledger.generated,
                "tokens_discarded": sum(ledger.discarded.values()),
                "samples_interrupted": counts.interruptions_total,
                "samples_resumed": counts.resumptions_total,
                "waiting_for": diagnosis,
            }
            await self._recorder.record.remote("status", status)
            try:
                await asyncio.wait_for(self._stopping.wait(), _HEARTBEAT_S)
            except TimeoutError:
                continue

    def _show(self, counts: DispatcherCounts, ledger: LedgerSnapshot) -> None:
        """Set the metrics of what is where."""
        self._metrics.set_all(
            {
                "apr_rollout_inflight_samples": counts.inflight,
                "apr_rollout_inflight_limit_samples": self._dispatcher.max_inflight,
                "apr_rollout_held_samples": counts.interrupted,
                "apr_rollout_unfinished_samples": counts.unfinished,
                "apr_rollout_unfinished_limit_samples": self._dispatcher.max_unfinished,
            }
        )
        for reason, tokens in ledger.discarded.items():
            self._metrics.raise_to("apr_rollout_discarded_tokens", tokens, reason=reason)

    def _moves(self) -> Moves:
        return Moves(
            tokens=self._engines.tokens_made,
            rewards=self._num_rewards,
            engines=self._engines.num_changes,
        )

    # -- one sample ------------------------------------------------------------------------------

    async def _generate(self, sample: Sample, began: int) -> None:
        """Run one generate call of a sample, and score it if that was the last one.

        Args:
            sample: In flight.
            began: When the call was decided on, for `FailureCount`.
        """
        sample_id = sample.sample_id
        request = GenerateRequest.of_sample(
            sample, self._config.sampling_params, number=self._num_calls, seed=self._seed(sample)
        )
        self._requests[sample_id] = request.request_id
        self._num_calls += 1
        if sample.num_tokens:
            self._metrics.add("apr_rollout_resumptions")
        try:
            generation = await self._client.generate(request)
        except RolloutError as error:
            await self._on_generation_error(sample_id, error, began)
            return
        finally:
            self._requests.pop(sample_id, None)
        self._outage.ended(sample_id)
        new = generation.num_tokens
        if new:
            self._generations.succeeded()
        self._engines.count_received(generation.replica_id, new)
        self._metrics.add("apr_rollout_generated_tokens", new)
        updated = self._state.on_generation(sample_id, generation)
        self._wake.set()
        if updated is None:
            return
        if updated.finish_reason is not None:
            await self._score(updated)
        elif updated.awaits_step:
            await self._step(updated)
        else:
            self._metrics.add("apr_rollout_interruptions", float(new > 0))

    async def _reset(self, sample: Sample) -> None:
        """Ask the environment what comes before the first turn."""
        await self._observe(sample, self._scorer.reset(sample))

    async def _step(self, sample: Sample) -> None:
        """Ask the environment to answer a turn, and score the sample if that was the last one."""
        text = self._tokenizer.decode(sample.turn_ids, skip_special_tokens=True)
        asked = self._state.set_turn_text(sample.sample_id, text)
        await self._observe(asked, self._scorer.step(asked))

    async def _observe(self, asked: Sample, answer: Awaitable[Step]) -> None:
        """Take the environment's answer, unless the sample was dropped or began anew meanwhile."""
        begin, began = time.monotonic(), self._steps.now
        try:
            step = await answer
            token_ids = () if step.done else encode_step(self._tokenizer, asked, step)
            sample = self._state.on_step(asked, step, token_ids)
        except (StepError, RolloutError) as error:
            if self._state.is_current(asked):
                self._metrics.add("apr_reward_failures", kind=getattr(error, "kind", "invalid"))
                await self._fail(asked.sample_id, error, self._steps, began)
            return
        self._num_rewards += 1
        self._steps.succeeded()
        self._metrics.observe("apr_environment_duration_seconds", time.monotonic() - begin)
        self._wake.set()
        if sample is not None and sample.finish_reason is not None:
            await self._score(sample, step.result)

    async def _score(self, sample: Sample, result: RewardResult | None = None) -> None:
        """Score a finished sample; the last one of a group sends the group to the buffer.

        Args:
            sample: Finished.
            result: What its environment gave with the last step, if it did.
        """
        if not self._partial_rollout.overlap_rewards:
            await self._all_generated()
            if sample.sample_id not in self._state:
                return
        text = self._tokenizer.decode(sample.response_ids, skip_special_tokens=True)
        sample = self._state.set_text(sample.sample_id, text)
        self._metrics.observe("apr_rollout_response_tokens", sample.num_generated)
        begin, began = time.monotonic(), self._scores.now
        try:
            result = result or await self._scorer.score(sample)
        except UserCodeError as error:
            self._metrics.add("apr_reward_failures", kind=error.kind)
            await self._fail(sample.sample_id, error, self._scores, began)
            return
        self._metrics.observe("apr_reward_duration_seconds", time.monotonic() - begin)
        self._num_rewards += 1
        self._scores.succeeded()
        group = self._state.on_reward(sample.sample_id, result)
        if group is not None:
            for member in group:
                self._failures.pop(member.sample_id, None)
            await self._hand_over(group)

    async def _hand_over(self, group: Sequence[Sample]) -> None:
        """Give a whole, scored group to the buffer."""
        group_id = group[0].group_id
        metas = tuple(SampleMeta.of(member) for member in group)
        self._on_their_way.add(group_id)
        await self._buffer.put_group.remote(metas, [ray.put(group)])
        self._on_their_way.remove(group_id)

    async def _all_generated(self) -> None:
        """Wait until nothing generates, or the run stops; each call in flight has a limit."""
        while self._dispatcher.is_generating and not self._stopping.is_set():
            self._generated.clear()
            await self._generated.wait()

    async def _on_generation_error(self, sample_id: str, error: RolloutError, began: int) -> None:
        """Try a sample again after a pause, or give its group up."""
        if not self._state.on_generation_error(sample_id):
            self._outage.ended(sample_id)
            return
        if isinstance(error, EngineUnavailableError):
            # no fault of the sample; how long the trainer waits for a batch is the limit
            self._outage.failed(sample_id, error)
            await asyncio.sleep(_RETRY_PAUSE_S)
            self._retry(sample_id)
            return
        failures = self._failures[sample_id] = self._failures.get(sample_id, 0) + 1
        logger.warning("sample %s, failure %d: %s", sample_id, failures, error)
        if failures >= self._config.max_request_failures:
            await self._fail(sample_id, error, self._generations, began)
            return
        self._count_failure(sample_id, error, self._generations, began)
        await asyncio.sleep(_RETRY_PAUSE_S * failures)
        self._retry(sample_id)

    def _retry(self, sample_id: str) -> None:
        if sample_id in self._state:
            self._state.on_retry(sample_id)
            self._wake.set()
        else:
            self._outage.ended(sample_id)

    async def _fail(
        self, sample_id: str, error: Exception, count: FailureCount, began: int
    ) -> None:
        """Drop the group of a sample whose generation or reward failed for good."""
        self._failures.pop(sample_id, None)
        logger.warning("the group of sample %s is dropped: %s", sample_id, error)
        running = self._state.fail(sample_id)
        self._wake.set()
        self._count_failure(sample_id, error, count, began)
        await self._abort(running)

    def _count_failure(
        self, sample_id: str, error: Exception, count: FailureCount, began: int
    ) -> None:
        """Stop the run when everything fails, instead of dropping group after group."""
        limit = self._config.max_consecutive_failures
        in_a_row = count.failed(cause_of(error, sample_id), began)
        if in_a_row >= limit and self._fatal is None:
            self._fatal = RolloutError(
                f"{limit} {count.what} failed in a row "
                f"(rollout.max_consecutive_failures); the last: {one_line(error)}"
            )
            self._stopping.set()  # not raised: cancelled calls would lose their tokens
            self._wake.set()

    async def _on_weights(self, policy_version: int) -> None:
        """Go on under a new version."""
        self._has_weights.set()
        await self._abort(self._state.on_version(policy_version))
        self._wake.set()

    async def _abort(self, sample_ids: Sequence[str]) -> None:
        """Abort the generate calls of these samples; those that have ended meanwhile are left, and
        those of an engine that does not answer end when Serve replaces it."""
        request_ids = [self._requests[s] for s in sample_ids if s in self._requests]
        if not request_ids:
            return
        try:
            await self._client.abort(request_ids)
        except RolloutError as error:
            logger.warning("%d calls are not aborted: %s", len(request_ids), one_line(error))

    def _seed(self, sample: Sample) -> int | None:
        """Seed of one request: siblings and continuations draw differently."""
        if self._config.sampling.seed is None:
            return None
        source = f"{self._config.sampling.seed}/{sample.sample_id}/{sample.num_tokens}"
        return int.from_bytes(hashlib.blake2b(source.encode(), digest_size=4).digest(), "big")


def _freeze_heap() -> None:
    """Spare all objects that there are from later garbage collections.

    A full one looks at each object: at 400,000 when the worker starts, for 0.24 s in which nothing
    is dispatched. Cycles among them are never freed; this process ends with the run.
    """
    gc.collect()
    gc.freeze()


async def _first_of(watched: Awaitable[Any], other: Awaitable[Any]) -> bool:
    """Wait for either; whether `watched` is done. What is not done is cancelled."""
    tasks = [asyncio.ensure_future(watched), asyncio.ensure_future(other)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks[0].done()
    finally:
        for task in tasks:
            if not task.done():
                task.cancel()


def _first_leaf(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error inside of nested groups."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
