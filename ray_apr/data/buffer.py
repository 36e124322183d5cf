"""The sample buffer: scored groups wait here for the trainer.

Invariants, kept by `SampleBuffer`:
    * It holds metadata and ObjectRefs; the payload goes from the rollout worker to the read task.
    * The batch of step k is chosen after the trainer granted step k, against the policy version of
      that grant: the staleness bound counts the time in the queue, and holds under any read-ahead.
    * Groups come in whole and leave whole: trained, or evicted with a reason.
    * Every wait has a limit; who runs into it learns what the rollout side is waiting for.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ray_apr.config import BufferConfig, OnStale
from ray_apr.data.batch import BatchPlan, plan_batch
from ray_apr.data.selection import Shelf
from ray_apr.exceptions import APRError, RolloutError, StarvedError
from ray_apr.metrics import Metrics
from ray_apr.staleness import next_version, oldest_trainable, staleness
from ray_apr.types import GroupMeta, SampleMeta


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTicket:
    """The batch of one step; `plan` is None when the stream has ended."""

    plan: BatchPlan | None = None
    refs: tuple[Any, ...] = ()
    """ObjectRef of each group's samples, in the plan's order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferState:
    """What the rollout worker follows."""

    cursor: int
    num_buffered: int
    """Samples neither trained nor evicted, the step in training included."""
    num_received: int
    """Samples ever put in."""
    trainer_version: int | None
    """Policy version after the last acknowledged step; None before the first one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferStats:
    """Figures of the buffer; tokens are response tokens."""

    buffered_samples: int
    buffered_tokens: int
    trained_samples: int
    trained_tokens: int
    """Tokens that entered the loss."""
    masked_tokens: int
    """Tokens of trained samples that were too old to enter the loss."""
    evicted_samples: int
    evicted_tokens: int
    read_ahead_max: int
    """Most samples that were handed to Ray Data and not yet trained."""


@dataclass(slots=True)
class _Grant:
    """A step that the trainer asked for, and its batch once there is one."""

    step: int
    policy_version: int
    granted_at: float
    ticket: BatchTicket | None = None
    groups: tuple[GroupMeta, ...] = ()


class SampleBuffer:
    """Async actor between the rollout worker and the train workers' streams.

    Args:
        batch_size: Samples of one optimizer step.
        max_staleness: Oldest token that is trained, in optimizer steps.
        on_stale: What becomes of groups whose oldest token is beyond that.
        num_ranks: Train workers.
        micro_batch_tokens: Token budget of one forward pass.
        config: Time limits.
        recorder: Handle of the recorder; gets a row for each trained sample.
    """

    def __init__(
        self,
        *,
        batch_size: int,
        max_staleness: int,
        on_stale: OnStale = "evict",
        num_ranks: int,
        micro_batch_tokens: int,
        config: BufferConfig,
        recorder: Any,
    ) -> None:
        self._recorder = recorder
        self._batch_size = batch_size
        self._max_staleness = max_staleness
        self._shelf = Shelf(batch_size=batch_size, max_staleness=max_staleness, on_stale=on_stale)
        self._unfinished: Mapping[int, int] = {}
        self._num_ranks = num_ranks
        self._micro_batch_tokens = micro_batch_tokens
        self._config = config
        self._changed = asyncio.Condition()
        self._refs: dict[str, Any] = {}
        """Payload of each group on the shelf."""
        self._sequence = 0
        self._grant: _Grant | None = None
        self._failure: APRError | None = None
        self._closed = False
        self._cursor = 0
        self._num_received = 0
        self._trainer_version: int | None = None
        self._diagnosis = ""
        self._diagnosed_at: float | None = None
        self._rollout_started_at = 0.0
        self._trained = _Tally()
        self._masked_tokens = 0
        self._evicted = _Tally()
        self._handed_out: dict[str, int] = {}
        self._read_ahead_max = 0
        self._metrics = Metrics()

    async def put_group(self, samples: Sequence[SampleMeta], refs: Sequence[Any]) -> None:
        """Take a whole, scored group.

        Args:
            samples: Metadata of all of its samples.
            refs: One ObjectRef, in a list so that Ray does not resolve it, of the tuple of samples.
        """
        group = GroupMeta(
            group_id=samples[0].group_id, sequence=self._sequence, samples=tuple(samples)
        )
        async with self._changed:
            if group.group_id in self._refs:
                raise RolloutError(f"group {group.group_id} is already in the buffer")
            self._sequence += 1
            self._num_received += len(group.samples)
            self._put_on_shelf(group, refs[0])
            self._choose()

    async def report_unfinished(self, by_version: Mapping[int, int]) -> None:
        """Tell which samples still generate or wait for a reward, for ``on_stale="wait"``.

        Args:
            by_version: Their number by the version of their group's oldest token.
        """
        async with self._changed:
            self._unfinished = by_version
            self._choose()

    async def grant(self, step: int, policy_version: int) -> None:
        """The trainer is ready for `step` at `policy_version`: its batch may be chosen."""
        async with self._changed:
            self._return_untrained()
            self._grant = _Grant(step, policy_version, time.monotonic())
            self._choose()

    async def take(self, rank: int, last_step: int | None) -> BatchTicket | None:
        """Hand out the granted batch to the stream of `rank`.

        Args:
            rank: The reader.
            last_step: Step that this reader got last; None for a new reader.

        Returns:
            A ticket; one without a plan at the end of the stream; None if the reader should call
            again because the wait reached ``poll_timeout_s``.

        Raises:
            StarvedError: If the batch is not complete ``wait_timeout_s`` after its grant.
            APRError: What stopped the rollout side.
        """

        def ready() -> bool:
            grant = self._grant
            new = grant is not None and grant.ticket is not None and grant.step != last_step
            return self._closed or self._failure is not None or new

        async with self._changed:
            try:
                async with asyncio.timeout(self._config.poll_timeout_s):
                    await self._changed.wait_for(ready)
            except TimeoutError:
                self._check_starved()
                return None
            if self._failure is not None:
                raise self._failure
            if self._closed or self._grant is None or self._grant.ticket is None:
                return BatchTicket()
            self._count_read_ahead(self._grant)
            return self._grant.ticket

    async def ack(self, step: int, next_policy_version: int | None = None) -> None:
        """The optimizer has done `step`: its samples are trained, and their payload is let go.

        Args:
            step: The step that was trained.
            next_policy_version: With it, the next step is granted at this version at once.

        Raises:
            APRError: If this is not the step that was handed out.
        """
        async with self._changed:
            grant = self._grant
            if grant is None or grant.ticket is None or grant.step != step:
                raise APRError(f"step {step} was trained, but its batch was not handed out")
            for group in grant.groups:
                self._count_trained(group, grant.policy_version)
                self._handed_out.pop(group.group_id, None)
            self._trainer_version = next_version(grant.policy_version)
            self._grant = None
            if next_policy_version is not None:
                self._grant = _Grant(step + 1, next_policy_version, time.monotonic())
            self._choose()
        oldest = oldest_trainable(grant.policy_version, self._max_staleness)
        await self._recorder.record_many.remote("sample", _sample_rows(grant, oldest))

    async def watch(self, cursor: int) -> BufferState:
        """Wait until something changed since `cursor`, or ``poll_timeout_s``."""
        async with self._changed:
            try:
                async with asyncio.timeout(self._config.poll_timeout_s):
                    await self._changed.wait_for(lambda: self._cursor != cursor or self._closed)
            except TimeoutError:
                pass  # an unchanged state is a good answer: the caller asks again
            return BufferState(
                cursor=self._cursor,
                num_buffered=self._num_buffered(),
                num_received=self._num_received,
                trainer_version=self._trainer_version,
            )

    async def report_rollout(self, diagnosis: str) -> None:
        """The rollout worker says what it is waiting for; shown when the trainer starves.

        The trainer's time limit runs from the first report on: the start of the servers has a
        limit of its own.
        """
        self._diagnosis = diagnosis
        if self._diagnosed_at is None:
            self._rollout_started_at = time.monotonic()
        self._diagnosed_at = time.monotonic()

    async def fail(self, error: APRError) -> None:
        """The rollout side has stopped for good: every reader gets its error."""
        async with self._changed:
            self._failure = self._failure or error
            self._touch()

    async def failure(self) -> APRError | None:
        """What stopped the rollout side, if anything did."""
        return self._failure

    async def close(self) -> None:
        """End all streams."""
        async with self._changed:
            self._closed = True
            self._return_untrained()
            self._touch()

    async def stats(self) -> BufferStats:
        """Figures of this moment."""
        return BufferStats(
            buffered_samples=self._num_buffered(),
            buffered_tokens=sum(g.num_tokens for g in self._untrained()),
            trained_samples=self._trained.samples,
            trained_tokens=self._trained.tokens - self._masked_tokens,
            masked_tokens=self._masked_tokens,
            evicted_samples=self._evicted.samples,
            evicted_tokens=self._evicted.tokens,
            read_ahead_max=self._read_ahead_max,
        )

    def _untrained(self) -> list[GroupMeta]:
        """Groups that wait, and those of the step in training."""
        granted = self._grant.groups if self._grant is not None else ()
        return [*granted, *self._shelf]

    def _num_buffered(self) -> int:
        return sum(len(group.samples) for group in self._untrained())

    def _choose(self) -> None:
        """Evict what is too old and choose the granted batch if it is complete."""
        grant = self._grant
        if grant is not None and grant.ticket is None:
            selection = self._shelf.select(grant.policy_version, self._unfinished)
            for group in selection.evicted:
                del self._refs[group.group_id]
                self._evicted.add(group)
                self._metrics.add("apr_buffer_evicted_samples", len(group.samples))
            if selection.chosen:
                # an order that does not depend on which reward came first
                grant.groups = tuple(sorted(selection.chosen, key=lambda g: g.group_id))
                grant.ticket = self._ticket(grant)
        self._touch()

    def _ticket(self, grant: _Grant) -> BatchTicket:
        refs = tuple(self._refs.pop(group.group_id) for group in grant.groups)
        plan = plan_batch(
            grant.groups,
            step=grant.step,
            policy_version=grant.policy_version,
            oldest_version=oldest_trainable(grant.policy_version, self._max_staleness),
            num_ranks=self._num_ranks,
            micro_batch_tokens=self._micro_batch_tokens,
        )
        return BatchTicket(plan=plan, refs=refs)

    def _return_untrained(self) -> None:
        """Put the batch of a step that was never acknowledged back, e.g. after a restart."""
        grant = self._grant
        if grant is not None and grant.ticket is not None:
            for group, ref in zip(grant.groups, grant.ticket.refs, strict=True):
                self._put_on_shelf(group, ref)
                self._handed_out.pop(group.group_id, None)
        self._grant = None

    def _put_on_shelf(self, group: GroupMeta, ref: Any) -> None:
        self._shelf.add(group)
        self._refs[group.group_id] = ref

    def _count_trained(self, group: GroupMeta, policy_version: int) -> None:
        self._trained.add(group)
        oldest = oldest_trainable(policy_version, self._max_staleness)
        trained = sum(sample.trainable_tokens(oldest) for sample in group.samples)
        self._masked_tokens += group.num_tokens - trained

    def _count_read_ahead(self, grant: _Grant) -> None:
        self._handed_out.update({g.group_id: len(g.samples) for g in grant.groups})
        self._read_ahead_max = max(self._read_ahead_max, sum(self._handed_out.values()))

    def _check_starved(self) -> None:
        """Raise if the granted batch has been waited for too long."""
        grant = self._grant
        if grant is None or grant.ticket is not None or self._diagnosed_at is None:
            return
        now = time.monotonic()
        waited = now - max(grant.granted_at, self._rollout_started_at)
        if waited >= self._config.wait_timeout_s:
            raise StarvedError(
                f"trainer starved: step {grant.step} waited {waited:.0f} s for a batch, "
                f"{self._shelf.num_samples} of {self._batch_size} samples are there; rollout side "
                f"{now - self._diagnosed_at:.0f} s ago: {self._diagnosis}"
            )

    def _touch(self) -> None:
        self._cursor += 1
        self._metrics.set("apr_buffer_samples", self._shelf.num_samples)
        self._changed.notify_all()


@dataclass(slots=True)
class _Tally:
    """Samples and their response tokens."""

    samples: int = 0
    tokens: int = 0

    def add(self, group: GroupMeta) -> None:
        self.samples += len(group.samples)
        self.tokens += group.num_tokens


def _sample_rows(grant: _Grant, oldest_version: int) -> list[dict[str, Any]]:
    """A row of the run folder for each sample of a trained batch; a sample without any token that
    was trained has no staleness."""
    return [
        {
            "step": grant.step,
            "staleness": _age(sample, grant.policy_version, oldest_version),
            "num_masked_tokens": sample.num_tokens - sample.trainable_tokens(oldest_version),
            **dataclasses.asdict(sample),
        }
        for group in grant.groups
        for sample in group.samples
    ]


def _age(sample: SampleMeta, policy_version: int, oldest_version: int) -> int | None:
    """Staleness of the oldest token that was trained."""
    version = sample.trained_version(oldest_version)
    return None if version is None else staleness(policy_version, version)
