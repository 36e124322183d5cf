"""What rollout side and buffer tell each other of how far they are, and for how long nothing has
moved.

Pure: no I/O, no ray, no torch; a clock is handed in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Moves:
    """How far the rollout side has come; a number that changes says that something has moved."""

    tokens: int = 0
    """Tokens that the engines have made, those of calls under way included."""
    rewards: int = 0
    """Answers of the reward function and of the environment."""
    engines: int = 0
    """Engines that came, went, paused, resumed or got new weights."""


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


_NAMES = {"tokens": "token", "rewards": "reward", "engines": "change of an engine"}


class Movement:
    """When each kind of progress was seen last.

    Args:
        clock: Seconds.

    Example:
        >>> now = [0.0]
        >>> movement = Movement(lambda: now[0])
        >>> movement.report(Moves(tokens=1))
        >>> now[0] = 7.0
        >>> movement.report(Moves(tokens=1, rewards=1))
        >>> now[0] = 9.0
        >>> movement.quiet_s(), movement.describe()
        (2.0, 'last token 9 s ago, last reward 2 s ago, last change of an engine 9 s ago')
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._moves: Moves | None = None
        self._moved_at: dict[str, float] = {}
        self._reported_at = 0.0

    @property
    def has_begun(self) -> bool:
        """Whether there was a report."""
        return self._moves is not None

    @property
    def report_age_s(self) -> float:
        """Seconds since the last report."""
        return self._clock() - self._reported_at

    def report(self, moves: Moves) -> None:
        """Note what the rollout side says of itself; its first report is progress of all kinds."""
        now = self._reported_at = self._clock()
        for name in _NAMES:
            if self._moves is None or getattr(moves, name) != getattr(self._moves, name):
                self._moved_at[name] = now
        self._moves = moves

    def quiet_s(self) -> float:
        """Seconds since anything has moved."""
        return self._clock() - max(self._moved_at.values(), default=self._clock())

    def describe(self) -> str:
        """Say when each kind has moved last."""
        now = self._clock()
        return ", ".join(
            f"last {_NAMES[name]} {now - at:.0f} s ago" for name, at in self._moved_at.items()
        )
