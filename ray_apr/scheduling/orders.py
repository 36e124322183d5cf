"""Orders to the train workers that travel in their streams, between two batches.

Each rank reads its own stream, at its own pace. An order takes collectives of all ranks, so that
each of them has to meet with it at the same place.

Invariants, kept by `Orders`:
    * Every rank gets an order before the batch of the order's step, and after all batches before.
    * Orders come to every rank in the same sequence, each one once.

Pure: no I/O, no ray, no torch, no clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class OrderKind(StrEnum):
    """What all ranks do."""

    SEND_WEIGHTS = "send_weights"
    """Send the weights again: engines have lost them."""
    CHECKPOINT = "checkpoint"
    """Write a checkpoint."""


@dataclass(frozen=True, slots=True)
class Order:
    """One of them."""

    kind: OrderKind
    step: int
    """Whose batch comes after it: so many steps are trained."""
    lost_version: int = -1
    """Policy version that engines have lost."""


class Orders:
    """The orders of a trainer since it began.

    Example:
        >>> orders = Orders()
        >>> orders.give(Order(OrderKind.CHECKPOINT, 4))
        >>> [getattr(orders.next_for(told, step), "kind", None) for told, step in ((0, 3), (1, 4))]
        [None, None]
        >>> orders.next_for(0, 4).kind
        <OrderKind.CHECKPOINT: 'checkpoint'>
    """

    def __init__(self) -> None:
        self._given: tuple[Order, ...] = ()

    def give(self, order: Order) -> None:
        """Add one; no batch of its step, or of a later one, was handed out yet."""
        self._given += (order,)

    def clear(self) -> None:
        """Forget all: the trainer begins again, with new readers."""
        self._given = ()

    def adopt(self, told: tuple[Order, ...]) -> None:
        """Take over what a reader was told by those before this one, and others perhaps not."""
        if len(told) > len(self._given):
            self._given = told

    def next_for(self, num_told: int, next_step: int | None) -> Order | None:
        """The order that comes before a rank's next batch; None: the batch is next.

        Args:
            num_told: Orders that the rank has had.
            next_step: Step of that batch; None before the trainer has begun.
        """
        if next_step is None or num_told >= len(self._given):
            return None
        order = self._given[num_told]
        return order if order.step <= next_step else None
