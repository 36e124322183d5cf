"""Ledger: where each generated token is (invariant 1).

Invariants, kept here:
    * A token enters once, through `generated`, and is then in exactly one place: interrupted,
      pending, buffered, trained, or discarded with a reason.
    * No place is ever below zero: a move of tokens that are not there raises.
    * The worker's actor holds one side and the buffer's the other. What one hands over the other
      takes over; the sum of both snapshots has ``error == 0`` whenever nothing is on its way. So
      does a run that goes on take over what the part before it kept.

The life of a token::

    generated -> interrupted -> pending -> handed over | buffered -> trained
                   any place -> discarded, with a reason:

    stale      the group was too old to be trained
    masked     the token was too old, but its sample was trained on newer ones
    restarted  the sample was interrupted and starts anew
    surplus    the sample was interrupted and its group given up
    filtered   the group was dropped for its content
    failed     a generation or a reward of the group failed for good
    poison     the group's prompt kills engines
    shutdown   the run ended
    lost       who was to get the token died or had given its call up, or the run began again
               before it was noted
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from ray_apr.core.exceptions import LedgerError

Place = Literal["pending", "interrupted", "buffered", "trained"]
DiscardReason = Literal[
    "stale", "masked", "restarted", "surplus", "failed", "poison", "filtered", "shutdown", "lost"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerSnapshot:
    """Tokens by place at one moment; ``a + b`` merges the sides of two actors."""

    generated: int = 0
    trained: int = 0
    buffered: int = 0
    interrupted: int = 0
    """Held by samples that have not ended, whether interrupted or in flight again."""
    pending: int = 0
    """Of samples that have ended and are not yet handed to the buffer."""
    discarded: Mapping[str, int] = field(default_factory=dict)
    """By reason."""

    @property
    def error(self) -> int:
        """generated - (trained + buffered + interrupted + pending + discarded): 0 when exact, above
        it tokens are missing, below it they are counted twice."""
        placed = self.trained + self.buffered + self.interrupted + self.pending
        return self.generated - placed - sum(self.discarded.values())

    def __add__(self, other: LedgerSnapshot) -> LedgerSnapshot:
        reasons = sorted({*self.discarded, *other.discarded})
        return LedgerSnapshot(
            generated=self.generated + other.generated,
            trained=self.trained + other.trained,
            buffered=self.buffered + other.buffered,
            interrupted=self.interrupted + other.interrupted,
            pending=self.pending + other.pending,
            discarded={r: self.discarded.get(r, 0) + other.discarded.get(r, 0) for r in reasons},
        )


class TokenLedger:
    """One side of the ledger, in the actor that owns it.

    Example:
        >>> worker, buffer = TokenLedger(), TokenLedger()
        >>> worker.generated(5)
        >>> worker.move(5, "interrupted", "pending")
        >>> worker.hand_over(5)
        >>> buffer.take_over(5)
        >>> buffer.move(5, "buffered", "trained")
        >>> (worker.snapshot() + buffer.snapshot()).error
        0
    """

    def __init__(self) -> None:
        self._generated = 0
        self._places: dict[str, int] = dict.fromkeys(get_args(Place), 0)
        self._discarded: dict[str, int] = dict.fromkeys(get_args(DiscardReason), 0)

    def generated(self, num_tokens: int) -> None:
        """The engine delivered new tokens of a sample that has not ended.

        Raises:
            LedgerError: If the number is negative; so in every method.
        """
        self._put("interrupted", num_tokens)
        self._generated += num_tokens

    def hand_over(self, num_tokens: int) -> None:
        """Pending tokens were handed to the buffer, whose own ledger takes them over."""
        self._take("pending", num_tokens)

    def take_over(self, num_tokens: int, place: Place = "buffered") -> None:
        """Tokens came that another side has counted: from the worker, or from a checkpoint."""
        self._put(place, num_tokens)

    def move(self, num_tokens: int, source: Place, target: Place) -> None:
        """Move tokens from one place to another.

        Raises:
            LedgerError: If there are fewer at the source.
        """
        self._take(source, num_tokens)
        self._put(target, num_tokens)

    def discard(self, num_tokens: int, source: Place, reason: DiscardReason) -> None:
        """Drop tokens, with a reason.

        Raises:
            LedgerError: If there are fewer at the source, or the reason is unknown.
        """
        if reason not in self._discarded:
            raise LedgerError(f"unknown reason {reason!r}; known: {', '.join(self._discarded)}")
        self._take(source, num_tokens)
        self._discarded[reason] += num_tokens

    def lose(self, num_tokens: int) -> None:
        """Engines delivered tokens that nobody noted."""
        self.generated(num_tokens)
        self.discard(num_tokens, "interrupted", "lost")

    def snapshot(self) -> LedgerSnapshot:
        """The places now; of one side alone, `error` is what it handed over."""
        return LedgerSnapshot(
            generated=self._generated,
            trained=self._places["trained"],
            buffered=self._places["buffered"],
            interrupted=self._places["interrupted"],
            pending=self._places["pending"],
            discarded=dict(self._discarded),
        )

    def _take(self, place: Place, num_tokens: int) -> None:
        here = self._places[place]
        if not 0 <= num_tokens <= here:
            raise LedgerError(f"{num_tokens} tokens cannot leave {place!r}, which has {here}")
        self._places[place] = here - num_tokens

    def _put(self, place: Place, num_tokens: int) -> None:
        if num_tokens < 0:
            raise LedgerError(f"{num_tokens} tokens cannot enter {place!r}")
        self._places[place] += num_tokens
