"""The gate between a run and who trains it: orders go in, lines of progress come out.

    caller ── order ──► StepGate ── orders_from ──► every rank, at its own pace
    caller ◄── news ─── StepGate ◄───── say ─────── the run's host

Invariants, kept by `StepGate`:
    * Orders are a log that all ranks follow one by one: no rank waits in a collective for another
      one that waits here, however long no order comes.
    * An order is done when every rank has asked for the one after it.
    * Each call waits for a limited time; who called then calls again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from ray_apr.train.answers import answer_of

Order: TypeAlias = str | None
"""None trains a step; a name writes a checkpoint of this name."""

_POLL_S = 20.0
_CALL_TIMEOUT_S = 60.0


class StepGate:
    """Async actor of a run in a host; it ends with who has started the run.

    Args:
        num_ranks: Train workers.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._orders: list[Order] = []
        self._num_done: dict[int, int] = {}
        """Orders that each rank has done."""
        self._lines: list[str] = []
        self._changed = asyncio.Condition()

    async def order(self, orders: Sequence[Order]) -> int:
        """Give orders; returns how many were given so far."""
        async with self._changed:
            self._orders += orders
            self._changed.notify_all()
            return len(self._orders)

    async def orders_from(self, rank: int, num_done: int, timeout_s: float) -> list[Order]:
        """Wait for orders after the first `num_done`, which this rank has done.

        Returns:
            They; none at the limit.
        """
        async with self._changed:
            self._num_done[rank] = num_done
            self._changed.notify_all()
        await self._reached(lambda: len(self._orders) > num_done, timeout_s)
        return self._orders[num_done:]

    async def say(self, line: str) -> None:
        """Take a line of progress."""
        async with self._changed:
            self._lines.append(line)
            self._changed.notify_all()

    async def news(
        self, num_lines: int, num_orders: int | None, timeout_s: float
    ) -> tuple[list[str], bool]:
        """Wait for lines beyond the first `num_lines`, or until so many orders are done.

        Returns:
            The new lines, and whether the orders are done; None of them never are.
        """

        def are_done() -> bool:
            done = self._num_done.values()
            return num_orders is not None and (
                len(done) == self._num_ranks and min(done) >= num_orders
            )

        await self._reached(lambda: len(self._lines) > num_lines or are_done(), timeout_s)
        return self._lines[num_lines:], are_done()

    async def _reached(self, condition: Callable[[], bool], timeout_s: float) -> None:
        async with self._changed:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._changed.wait_for(condition)
            except TimeoutError:
                return


class GateClient:
    """A rank's side of the gate.

    Args:
        gate: Handle of the `StepGate`.
        rank: Of this train worker.
    """

    def __init__(self, gate: Any, rank: int) -> None:
        self._gate = gate
        self._rank = rank
        self._num_done = -1
        """Orders done; the one that `next` has returned last is under way."""

    def next(self) -> Order:
        """Say that the last order is done, and wait for the next one.

        Waits for: an order. Unblocked by: that, or the death of the gate; a call waits for
        `_POLL_S`.

        Raises:
            TrainError: If the gate is dead: who has started the run is gone.
            StarvedError: If the gate does not answer.
        """
        self._num_done += 1
        while True:
            asked = self._gate.orders_from.remote(self._rank, self._num_done, _POLL_S)
            orders: list[Order] = answer_of(
                asked, "gate of the steps, for an order", _POLL_S + _CALL_TIMEOUT_S
            )
            if orders:
                return orders[0]
