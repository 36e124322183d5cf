"""The sample buffer: scored groups wait here for the trainer.

Invariants, kept by `SampleBuffer`:
    * It holds metadata, and payload as it is carried (`data.store`); only the read task opens it.
    * The batch of step k is chosen against the policy version that trains it, shortly before step
      k - 1 ends: the staleness bound counts the time in the queue. Ray Data may read that one
      ahead, and no later one.
    * Groups come in whole and leave whole: trained, or evicted with a reason (`stock.Stock`).
    * What it decides is in the journal before anybody hears of it, so that the buffer that follows
      one that died says the same. The end of a step may be told twice; it counts once.
    * A wait for a batch ends when nothing has moved for its limit, however long it takes; who runs
      into it learns what has not, and what the rollout side is waiting for.
    * What all ranks are to do together comes to each at the same place of its stream (`Orders`):
      a checkpoint; the weights again, where no engine has them and the trainer waits for its batch.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ray_apr.config import BufferConfig, OnStale
from ray_apr.core.exceptions import APRError, ResourceError, StarvedError
from ray_apr.core.group import SampleMeta
from ray_apr.core.metrics import Metrics
from ray_apr.data.buffer_notes import BufferNotes
from ray_apr.data.journal import JournalFolder
from ray_apr.data.kept_samples import KeptSamples
from ray_apr.data.movement import BufferState, Movement, Moves
from ray_apr.data.resumption import Replayed
from ray_apr.data.shown import show_evicted, show_trained
from ray_apr.scheduling.grant import BatchTicket, sample_rows, told_figures
from ray_apr.scheduling.orders import Order, OrderKind, Orders
from ray_apr.scheduling.stock import BufferStats, Stock


class SampleBuffer:
    """Async actor between the rollout worker and the train workers' streams.

    Waits for: the recorder, where there are rows for it. Unblocked by: its answer or its death.

    Args:
        batch_size: Samples of one step.
        max_staleness: Oldest token that is trained, in policy versions.
        on_stale: What becomes of groups whose oldest token is beyond that.
        num_ranks: Train workers.
        micro_batch_tokens: Token budget of one forward pass.
        mini_batches: Optimizer steps of one batch.
        packed: Whether micro-batches have no padding.
        num_steps: Steps of the run; None: it has no end.
        config: Time limits.
        recorder: Handle of the recorder; gets a row for each trained sample.
        save_samples: Share of the groups whose texts the recorder gets, too.
        run: Name of the run, which its metrics carry.
        journal: Where the journal is; None: nothing is noted.
        epoch: Number of its first epoch.
        header: What the run's samples are made with.
        replayed: What the run goes on with; None: nothing.
    """

    def __init__(
        self,
        *,
        batch_size: int,
        max_staleness: int,
        on_stale: OnStale = "evict",
        num_ranks: int,
        micro_batch_tokens: int,
        mini_batches: int = 1,
        packed: bool = False,
        num_steps: int | None = None,
        config: BufferConfig,
        recorder: Any,
        save_samples: float = 0.0,
        run: str = "",
        journal: JournalFolder | None = None,
        epoch: int = 0,
        header: Mapping[str, Any] | None = None,
        replayed: Replayed | None = None,
    ) -> None:
        self._stock = Stock(
            batch_size=batch_size,
            max_staleness=max_staleness,
            on_stale=on_stale,
            num_ranks=num_ranks,
            micro_batch_tokens=micro_batch_tokens,
            mini_batches=mini_batches,
            packed=packed,
            num_steps=num_steps,
        )
        self._recorder = recorder
        self._kept = KeptSamples(recorder, save_samples)
        self._config = config
        self._changed = asyncio.Condition()
        self._begun: dict[int, str] = {}
        """Reader of each rank whose stream has got a batch since the trainer began."""
        self._orders = Orders()
        self._failure: APRError | None = None
        self._closed = False
        self._cursor = 0
        self._diagnosis = ""
        self._movement = Movement(time.monotonic)
        self._metrics = Metrics(run)
        self._notes = BufferNotes(journal, epoch, header, self._stock)
        self._ended: tuple[int, Mapping[str, float]] = (-1, {})
        """The last step that was trained, and what the trainer was told."""
        if replayed is not None:
            self._go_on(replayed)

    def _go_on(self, replayed: Replayed) -> None:
        """Take up the state of the buffer that was here before, but for its groups."""
        self._stock.go_on(replayed.plan)
        self._ended = replayed.trained or self._ended
        if replayed.takes_over:
            self._stock.trainer_version = replayed.policy_version
        if replayed.granted is not None:  # the engines may have none as new yet
            self._stock.grant(*replayed.granted, time.monotonic())
            self._stock.trainer_version = replayed.granted[1]
        self._notes.of_grant()

    async def put_group(self, samples: Sequence[SampleMeta], refs: Sequence[Any]) -> None:
        """Take a whole, scored group; it may be told twice.

        Args:
            samples: Metadata of all of its samples.
            refs: The tuple of samples, as `carry` gives it.
        """
        async with self._changed:
            self._stock.put(samples, refs[0])
            await self._choose()

    async def report_unfinished(self, by_version: Mapping[int, int]) -> None:
        """The rollout worker says what is still to come, which ``on_stale="wait"`` waits for.

        Args:
            by_version: Samples of groups that are not handed over yet, by the version of the
                group's oldest token.
        """
        async with self._changed:
            if self._stock.set_unfinished(by_version):  # else `watch` would have it told again
                await self._choose()

    async def grant(self, step: int, policy_version: int) -> None:
        """The trainer is ready for `step` at `policy_version`: its batch may be chosen.

        It is its first call; a trainer that begins again has new readers.
        """
        async with self._changed:
            grant = self._stock.granted
            if grant is None or (grant.step, grant.policy_version) != (step, policy_version):
                self._begun.clear()
                self._orders.clear()
                self._grant(step, policy_version)
            await self._choose()
        await self._notes.flush()

    def _grant(self, step: int, policy_version: int) -> None:
        self._stock.grant(step, policy_version, time.monotonic())
        self._notes.of_grant()

    async def send_again(self, policy_version: int) -> bool:
        """The rollout side says that no engine has the weights of a version any more, which it had.

        Returns:
            Whether the trainer is told; it sends weights by itself where it waits for no batch.
        """
        async with self._changed:
            grant = self._stock.granted
            if grant is None or grant.step != self._stock.open_step:
                return False
            self._orders.give(Order(OrderKind.SEND_WEIGHTS, grant.step, policy_version))
            self._touch()
            return True

    async def order_checkpoint(self) -> int | None:
        """Have all ranks write a checkpoint before the next batch that none of them has got.

        Returns:
            Steps that it will have trained; None where the trainer has not begun.
        """
        async with self._changed:
            step = self._stock.open_step
            if step is not None:
                self._orders.give(Order(OrderKind.CHECKPOINT, step))
                self._touch()
            return step

    async def take(
        self, rank: int, last_step: int | None, told: tuple[Order, ...] = (), *, reader: str = ""
    ) -> BatchTicket | None:
        """Hand out the next batch to the stream of `rank`; it may be told twice.

        Args:
            rank: Whose stream it is.
            last_step: Step that its reader got last; None for a new reader.
            told: Orders that this reader got, of its whole stream.
            reader: Its name, another one for each process.

        Returns:
            A ticket; one of nothing at the end of the stream; None if the reader should call again
            because the wait reached ``poll_timeout_s``.

        Raises:
            StarvedError: If the batch is not complete, and neither tokens nor rewards nor engines
                have moved for ``wait_timeout_s`` since its grant.
            ResourceError: If the reader of a stream that has begun is new: its process has died.
            APRError: What stopped the rollout side.
        """
        if self._begun.get(rank, reader) != reader:
            error = ResourceError(
                f"the process that read the batches of train worker {rank} has died (out of "
                "memory?), and with it a batch; the logs of its node say why"
            )
            await self.fail(error)  # Ray Data ends its stream as if there were no more batches
            raise error
        self._orders.adopt(told)

        def order() -> Order | None:
            return self._orders.next_for(len(told), self._stock.next_step(last_step))

        def ready() -> bool:
            new = self._stock.next_batch(last_step) is not None
            return self._closed or self._failure is not None or new or order() is not None

        async with self._changed:
            due_s = min(self._stock.next_in_s(time.monotonic()), self._starves_in_s())
            try:
                async with asyncio.timeout(min(self._config.poll_timeout_s, due_s)):
                    await self._changed.wait_for(ready)
            except TimeoutError:
                if self._stock.next_in_s(time.monotonic()) == 0:
                    await self._choose()
                if not ready() and not self._is_starved():
                    return None
            if self._failure is not None:
                raise self._failure
            if self._closed:
                return BatchTicket()
            self._begun[rank] = reader
            if (due := order()) is not None:
                return BatchTicket(order=due)
            ticket = self._stock.hand_out(last_step, rank)
        await self._notes.flush()
        return ticket

    async def ack(
        self, step: int, next_policy_version: int | None = None
    ) -> dict[str, float] | None:
        """The optimizer has done `step`: its samples are trained, and their payload is let go. It
        may be told twice, also while the first call runs.

        Args:
            step: The step that was trained.
            next_policy_version: With it, the next step is granted at this version at once.

        Returns:
            Figures of what rewards told beside their number, and the turns (`told_figures`); None
            if the trainer should call again: a buffer that died had handed the step's groups out,
            and they are on their way here.

        Raises:
            APRError: If this is not the step that was handed out, or what stopped the rollout side.
        """
        async with self._changed:
            is_over = self._closed or self._failure is not None
            if self._stock.awaits_batch_of(step) and not (is_over or self._is_starved()):
                return None
            if step != self._ended[0]:  # else it was told, and who told it has not heard of it
                await self._end_step(step, next_policy_version)
            figures = dict(self._ended[1])
        await self._notes.flush()
        return figures

    async def _end_step(self, step: int, next_policy_version: int | None) -> None:
        """End a step, with `_changed` held: what is noted of it is noted at once."""
        if self._failure is not None:
            raise self._failure
        batch = self._stock.batch_of(step)
        rows = sample_rows(batch)
        await self._recorder.record_many.remote("sample", rows)  # which takes a step once
        await self._kept.keep(batch, rows)
        self._stock.end_step(step, time.monotonic())
        self._ended = (step, told_figures(rows))
        self._notes.of_trained(*self._ended)
        if next_policy_version is not None:
            self._grant(step + 1, next_policy_version)
        await self._choose()
        show_trained(self._metrics, rows)

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
                num_buffered=self._stock.num_buffered,
                num_received=self._stock.num_received,
                trainer_version=self._stock.trainer_version,
            )

    async def report_rollout(self, diagnosis: str, moves: Moves) -> int:
        """The rollout worker says what it is waiting for, shown when the trainer starves, and how
        far it has come; it gets the number of tokens that were dropped here.

        The trainer's time limit runs from the first report on: the start of the servers has a
        limit of its own.
        """
        self._diagnosis = diagnosis
        self._movement.report(moves)
        grant = self._stock.granted
        waited_s = 0.0 if grant is None or grant.groups else time.monotonic() - grant.granted_at
        self._metrics.set("apr_buffer_batch_wait_seconds", waited_s)
        return self._stock.num_discarded

    async def fail(self, error: APRError) -> None:
        """The rollout side has stopped for good: every reader gets its error."""
        async with self._changed:
            self._failure = self._failure or error
            self._touch()

    async def failure(self) -> APRError | None:
        """What stopped the rollout side, if anything did."""
        return self._failure

    async def wait_until_stopped(self) -> None:
        """Wait for `close`; who waits learns at once of this process's death."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._closed)

    async def close(self) -> None:
        """End all streams."""
        async with self._changed:
            self._closed = True
            self._stock.return_untrained()
            self._touch()

    async def finish_samples(self) -> None:
        """Wait until the samples of the last step are in the run folder; see `KeptSamples`."""
        await self._kept.finish()

    async def stats(self) -> BufferStats:
        """Figures of this moment."""
        return self._stock.stats()

    async def held(self, epoch: int) -> tuple[BufferStats, list[Any]]:
        """Figures of this moment, and the samples of each group that it holds, as carried.

        Args:
            epoch: Of the journal, that begins with this moment.
        """
        self._notes.begin_epoch(epoch)
        held = self._stock.stats(), [ref for _, ref in self._stock.held()]
        await self._notes.flush()  # it may be all that the next buffer has of the step under way
        return held

    async def _choose(self) -> None:
        """Evict what is too old and choose batches that are complete."""
        known = {grant.step for grant in self._stock.batches}
        evicted = self._stock.choose(time.monotonic())
        for grant in self._stock.batches:
            if grant.step not in known:
                self._notes.of_batch(grant)
        self._touch()
        if evicted:
            rows = show_evicted(self._metrics, evicted)
            self._notes.of_evicted(rows)
            await self._recorder.record_many.remote("dropped", rows)

    def _starves_in_s(self) -> float:
        """Seconds until the run fails if nothing moves; infinite where no batch is waited for."""
        grant, movement = self._stock.granted, self._movement
        if grant is None or grant.groups or not movement.has_begun:
            return float("inf")
        quiet_s = min(time.monotonic() - grant.granted_at, movement.quiet_s())
        return max(0.0, self._config.wait_timeout_s - quiet_s)

    def _is_starved(self) -> bool:
        """Fail if the granted batch is waited for and nothing has moved for too long."""
        grant, moved, limit_s = self._stock.granted, self._movement, self._config.wait_timeout_s
        if grant is None or self._starves_in_s() > 0:
            return False
        self._failure = StarvedError(
            f"trainer starved: step {grant.step} waited "
            f"{time.monotonic() - grant.granted_at:.0f} s for a batch, {self._stock.diagnosis()}, "
            f"and nothing has moved for {limit_s:g} s (buffer.wait_timeout_s): "
            f"{moved.describe()}; rollout side {moved.report_age_s:.0f} s ago: {self._diagnosis}"
        )
        self._touch()
        return True

    def _touch(self) -> None:
        self._cursor += 1
        self._metrics.set("apr_buffer_samples", self._stock.num_waiting)
        self._changed.notify_all()
