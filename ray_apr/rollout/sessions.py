"""One sample's way: generate calls, steps of its environment, its reward, the buffer.

Invariants, kept by `Sessions`:
    * The scheduler hears of everything that happens to a sample, and alone decides what follows.
    * A call that fails is tried again after a pause, a bounded number of times for a sample and for
      its prompt; then its group is dropped. When everything fails the run stops, instead of
      dropping group after group.
    * An engine that is gone is no failure; what kills it is found by `Poison`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Coroutine, Sequence
from typing import Any

from ray_apr.config import RolloutConfig
from ray_apr.core.exceptions import (
    EngineDiedError,
    EngineUnavailableError,
    RolloutError,
    StepError,
    UserCodeError,
    one_line,
)
from ray_apr.core.group import SampleMeta
from ray_apr.core.ledger import LedgerSnapshot
from ray_apr.core.messages import GenerateRequest
from ray_apr.core.metrics import Metrics
from ray_apr.core.protocols import RolloutClient
from ray_apr.core.sample import Sample, SampleState
from ray_apr.core.user import RewardResult, Step
from ray_apr.data.replay import ended_row
from ray_apr.data.store import carry
from ray_apr.rollout.engines import EngineWatch
from ray_apr.rollout.failures import FailureCount, Outage, cause_of, told
from ray_apr.rollout.notes import Notes
from ray_apr.rollout.poison import Poison
from ray_apr.rollout.scoring import Scorer
from ray_apr.rollout.turns import decode, encode_step, with_texts
from ray_apr.scheduling.live import LiveSample
from ray_apr.scheduling.scheduler import Scheduler
from ray_apr.scheduling.suspects import is_convicted

logger = logging.getLogger(__name__)

_RETRY_PAUSE_S = 1.0


class Sessions:
    """The calls of all samples that the scheduler started.

    Args:
        scheduler: Is told what happened.
        config: Sampling and limits.
        overlap_rewards: Score each sample as soon as it ends, or once nothing generates.
        tokenizer: Decodes for the reward function and the environment, encodes what it says.
        scorer: Calls them.
        buffer: Handle of the sample buffer.
        engines: Counts what comes from each engine.
        notes: Writes what happens into the journal.
        poison: Knows the prompts that kill engines.
        metrics: Of the run.
    """

    client: RolloutClient
    """Of the rollout servers, once they run."""

    def __init__(
        self,
        scheduler: Scheduler,
        config: RolloutConfig,
        *,
        overlap_rewards: bool,
        tokenizer: Any,
        scorer: Scorer,
        buffer: Any,
        engines: EngineWatch,
        notes: Notes,
        poison: Poison,
        metrics: Metrics,
    ) -> None:
        self._scheduler = scheduler
        self._config = config
        self._overlap_rewards = overlap_rewards
        self._tokenizer = tokenizer
        self.scorer = scorer
        self._buffer = buffer
        self._engines = engines
        self._notes = notes
        self._poison = poison
        self._metrics = metrics
        self.wake = asyncio.Event()
        """Set when the scheduler may have something new to say."""
        self.stopping = asyncio.Event()
        self.generated = asyncio.Event()
        """Set while nothing generates; only looked at where rewards do not overlap."""
        self.fatal: RolloutError | None = None
        """Why everything stops."""
        self.num_rewards = 0
        """Answers of the reward function and of the environment."""
        self.on_their_way: dict[str, Sequence[Sample]] = {}
        """Scored groups that the buffer does not have yet: at the start those of a checkpoint."""
        self._num_arriving = 0
        """Those of them that were sent to it."""
        self._arrived = asyncio.Event()
        self._may_hand_over = asyncio.Event()
        self._may_hand_over.set()
        self.ended: list[dict[str, Any]] = []
        """Rows of the samples that have ended, until the worker has them recorded."""
        self.outage = Outage()
        self._num_calls = 0
        self._generations = FailureCount("generations")
        self._failures_of: Counter[str] = Counter()
        """Calls that failed, by prompt: of all its samples, also when it is tried again."""
        self._steps = FailureCount("steps of the environment")
        self._scores = FailureCount("rewards")

    def generate(self, live: LiveSample) -> Coroutine[Any, Any, None]:
        """Run a generate call of a sample that was just started, and what follows from it."""
        sample, seed = live.sample, self._config.sampling.seed_of(live.sample)
        request = GenerateRequest.of_sample(
            sample, self._config.sampling_params, number=self._num_calls, seed=seed
        )
        live.request_id = request.request_id
        self._num_calls += 1
        return self._generate(live, request, self._generations.now)

    async def _generate(self, live: LiveSample, request: GenerateRequest, began: int) -> None:
        """Run one generate call of a sample, and score it if that was the last one.

        Args:
            live: In flight.
            request: What the engine is asked.
            began: When the call was decided on, for `FailureCount`.
        """
        sample_id = live.sample_id
        if live.sample.num_tokens:
            self._metrics.add("apr_rollout_resumptions")
        try:
            generation = await self._poison.generate(self.client, live, request)
        except RolloutError as error:
            live.request_id = ""
            await self._on_generation_error(live, error, began)
            return
        live.request_id = ""
        self.outage.ended(sample_id)
        new = generation.num_tokens
        if new:
            self._generations.succeeded()
        self._engines.count_received(generation.replica_id, new)
        self._metrics.add("apr_rollout_generated_tokens", new)
        updated = self._scheduler.on_generation(live, generation)
        self.wake.set()
        if updated is None:
            return
        self._notes.of(live)
        if updated.finish_reason is not None:
            await self._score(live)
        elif updated.awaits_step:
            await self._step(live)
        else:
            self._metrics.add("apr_rollout_interruptions", float(new > 0))

    @property
    def ledger(self) -> LedgerSnapshot:
        """The worker's side of the ledger; groups on their way to the buffer are still here."""
        ledger = self._scheduler.live.ledger.snapshot()
        groups = self.on_their_way.values()
        num_tokens = sum(sample.num_generated for group in groups for sample in group)
        return dataclasses.replace(ledger, pending=ledger.pending + num_tokens)

    async def go_on(self, tasks: asyncio.TaskGroup) -> None:
        """Go on with what a checkpoint had under way, but for what engines generate.

        Args:
            tasks: Get those of all calls.
        """
        for group in list(self.on_their_way.values()):
            await self._hand_over(group)
        for live in [live for group in self._scheduler.live.groups for live in group.members]:
            if live.state is SampleState.FINISHED:
                tasks.create_task(self._score(live), name=f"score-{live.sample_id}")
            elif live.state is SampleState.STEPPING and live.sample.awaits_step:
                tasks.create_task(self._step(live), name=f"step-{live.sample_id}")

    async def reset(self, live: LiveSample) -> None:
        """Ask the environment what comes before the first turn."""
        await self._observe(live, live.sample, self.scorer.reset(live.sample))

    async def _step(self, live: LiveSample) -> None:
        """Ask the environment to answer a turn, and score the sample if that was the last one."""
        asked = live.note(turn_text=decode(self._tokenizer, live.sample.turn_ids))
        await self._observe(live, asked, self.scorer.step(asked))

    async def _observe(self, live: LiveSample, asked: Sample, answer: Awaitable[Step]) -> None:
        """Take the environment's answer, unless the sample was dropped or began anew meanwhile.

        Waits for: the environment. Unblocked by: its answer, or `rollout.reward.timeout_s` of each
        try.
        """
        begin, began = time.monotonic(), self._steps.now
        try:
            step = await answer
            ends = self._scheduler.finish_reason(asked, step) is not None
            token_ids = () if ends else encode_step(self._tokenizer, asked, step)
            sample = self._scheduler.on_step(live, asked, step, token_ids)
        except (StepError, RolloutError) as error:
            if self._scheduler.is_current(live, asked):
                self._metrics.add("apr_reward_failures", kind=getattr(error, "kind", "invalid"))
                self._fail(live, error, self._steps, began)
            return
        if sample is not None:
            self._notes.of(live)
        self.num_rewards += 1
        self._steps.succeeded()
        self._metrics.observe("apr_environment_duration_seconds", time.monotonic() - begin)
        self.wake.set()
        if sample is not None and sample.finish_reason is not None:
            await self._score(live, step.result)

    async def _score(self, live: LiveSample, result: RewardResult | None = None) -> None:
        """Score a finished sample; the last one of a group sends the group to the buffer.

        Args:
            live: Finished.
            result: What its environment gave with the last step, if it did.
        """
        live.sample = sample = with_texts(self._tokenizer, live.sample)
        if result is not None:  # a checkpoint has to know it: nobody can be asked again
            sample = live.note(reward=result.reward, reward_metrics=result.metrics)
            self._notes.of(live)
        version, reason = sample.newest_version or 0, sample.finish_reason
        self.ended.append(ended_row(sample.sample_id, version, sample.num_generated, reason))
        if not self._overlap_rewards:
            await self._all_generated()
            if not live.is_live:
                return
        self._metrics.observe("apr_rollout_response_tokens", sample.num_generated)
        begin, began = time.monotonic(), self._scores.now
        try:
            result = result or await self.scorer.score(sample)
        except UserCodeError as error:
            self._metrics.add("apr_reward_failures", kind=error.kind)
            self._fail(live, error, self._scores, began)
            return
        self._metrics.observe("apr_reward_duration_seconds", time.monotonic() - begin)
        self.num_rewards += 1
        self._scores.succeeded()
        is_live = live.is_live
        group = self._scheduler.on_reward(live, result)
        if is_live:
            self._notes.of(live)
        if group is not None:
            self.on_their_way[group[0].group_id] = group
            await self._notes.hand_over(group)
            await self._hand_over(group)

    async def _hand_over(self, group: Sequence[Sample]) -> None:
        """Give a whole, scored group to the buffer.

        Waits for: the end of a capture, then the buffer. Unblocked by: that; its answer or its
        death.
        """
        group_id = group[0].group_id
        metas = tuple(SampleMeta.of(member) for member in group)
        await self._may_hand_over.wait()
        self._num_arriving += 1
        try:
            await self._buffer.put_group.remote(metas, [carry(group)])
            del self.on_their_way[group_id]
            self.wake.set()  # it is not to come any more
        finally:
            self._num_arriving -= 1
            self._arrived.set()

    @contextlib.asynccontextmanager
    async def hand_overs_held(self) -> AsyncIterator[None]:
        """Inside of it no group goes to the buffer, and all that were sent to it are there.

        Waits for: the groups under way. Unblocked by: the buffer's answers or its death.
        """
        self._may_hand_over.clear()
        try:
            while self._num_arriving:
                self._arrived.clear()
                await self._arrived.wait()
            yield
        finally:
            self._may_hand_over.set()

    async def _all_generated(self) -> None:
        """Return once nothing generates, or the run stops.

        Waits for: the calls in flight. Unblocked by: their ends, each of which has a limit, or the
        run's.
        """
        while self._scheduler.live.num_unfinished and not self.stopping.is_set():
            self.generated.clear()
            await self.generated.wait()

    async def _on_generation_error(self, live: LiveSample, error: RolloutError, began: int) -> None:
        """Try a sample again after a pause, or give its group up."""
        sample_id = live.sample_id
        if not live.is_live:
            self.outage.ended(sample_id)
            return
        if isinstance(error, EngineUnavailableError):
            if is_convicted(live):
                self._set_aside(live, error)
                return
            if isinstance(error, EngineDiedError):
                self._notes.of(live)
            # no fault of the sample; how long the trainer waits for a batch is the limit
            self.outage.failed(sample_id, error)
            await asyncio.sleep(_RETRY_PAUSE_S)
            await self._engines.wait_for_any()  # to make requests of long samples takes time
            self._retry(live)
            return
        prompt, limit = live.group.group_id.partition("~")[0], self._config.max_request_failures
        live.num_failures += 1
        self._failures_of[prompt] += 1
        failures = live.num_failures
        logger.warning("sample %s, failure %d: %s", sample_id, failures, error)
        if failures >= limit or self._failures_of[prompt] >= limit * self._config.group_size:
            self._fail(live, error, self._generations, began)
            return
        self._count_failure(sample_id, error, self._generations, began)
        await asyncio.sleep(_RETRY_PAUSE_S * failures)
        self._retry(live)

    def _set_aside(self, live: LiveSample, error: Exception) -> None:
        """Give a prompt up that kills engines."""
        self.outage.ended(live.sample_id)
        too_many = self._poison.convict(live, error)
        self.wake.set()
        if too_many is not None:
            self._stop(too_many)

    def _retry(self, live: LiveSample) -> None:
        if live.is_live:
            self._scheduler.on_retry(live)
            self._notes.of_cut(live)
            self.wake.set()
        else:
            self.outage.ended(live.sample_id)

    def _fail(self, live: LiveSample, error: Exception, count: FailureCount, began: int) -> None:
        """Drop the group of a sample whose generation, step or reward failed for good."""
        logger.warning("the group of sample %s is dropped: %s", live.sample_id, error)
        self._scheduler.fail(live, error=told(error, live.sample_id))
        self.wake.set()
        self._count_failure(live.sample_id, error, count, began)

    def _count_failure(
        self, sample_id: str, error: Exception, count: FailureCount, began: int
    ) -> None:
        """Stop the run when everything fails, instead of dropping group after group."""
        limit = self._config.max_consecutive_failures
        in_a_row = count.failed(cause_of(error, sample_id), began)
        if in_a_row >= limit:
            self._stop(
                RolloutError(
                    f"{limit} {count.what} failed in a row "
                    f"(rollout.max_consecutive_failures); the last: {one_line(error)}"
                )
            )

    def _stop(self, reason: RolloutError) -> None:
        """Stop everything; not raised, as cancelled calls would lose their tokens."""
        self.fatal = self.fatal or reason
        self.stopping.set()
        self.wake.set()

    def abort(self, samples: Sequence[LiveSample]) -> Coroutine[Any, Any, None]:
        """Abort the generate calls that these samples have now; those that have ended meanwhile are
        left, and those of an engine that does not answer end when Serve replaces it."""
        return self._abort([live.request_id for live in samples if live.request_id])

    async def _abort(self, request_ids: Sequence[str]) -> None:
        if not request_ids:
            return
        try:
            await self.client.abort(request_ids)
        except RolloutError as error:
            logger.warning("%d calls are not aborted: %s", len(request_ids), one_line(error))
