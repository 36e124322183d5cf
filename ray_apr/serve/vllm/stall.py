"""How long an engine that has something to do has made no progress.

Invariants, kept by `StallWatch`:
    * Only time in which the engine has requests and is not paused counts, from its last progress;
      and none in which it does something else, as long as it may.
    * An engine that has stalled stays so until it makes progress again: that its requests were
      taken away is none.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator


class StallWatch:
    """Follows requests, pauses and progress of one engine.

    Args:
        limit_s: Longest time without progress.
        clock: Seconds.

    Example:
        >>> now = [0.0]
        >>> watch = StallWatch(5.0, clock=lambda: now[0])
        >>> watch.set_running(1)
        >>> now[0] = 4.0
        >>> watch.quiet_s
        4.0
    """

    def __init__(self, limit_s: float, clock: Callable[[], float] | None = None) -> None:
        self.limit_s = limit_s
        self.is_stalled = False
        self._clock = clock or time.monotonic
        self._moved_at = self._excused_until = self._clock()
        self._num_running = 0
        self._is_paused = False

    @property
    def quiet_s(self) -> float:
        """Seconds without progress; 0 where none is expected."""
        since = max(self._moved_at, self._excused_until)
        return max(0.0, self._clock() - since) if self._is_busy else 0.0

    @property
    def _is_busy(self) -> bool:
        return self._num_running > 0 and not self._is_paused

    def set_running(self, num_running: int) -> None:
        """Tell how many requests the engine holds."""
        was_busy, self._num_running = self._is_busy, num_running
        self._begin(was_busy)

    def set_paused(self, is_paused: bool) -> None:
        """Tell whether the engine is frozen."""
        was_busy, self._is_paused = self._is_busy, is_paused
        self._begin(was_busy)

    @contextlib.contextmanager
    def excused(self, limit_s: float) -> Iterator[None]:
        """While the engine does something else, which may take so long."""
        self._excused_until = self._clock() + limit_s
        try:
            yield
        finally:
            self._excused_until = self._clock()

    def _begin(self, was_busy: bool) -> None:
        if self._is_busy and not was_busy:
            self._moved_at = self._clock()

    def move(self) -> None:
        """The engine has made progress."""
        self._moved_at = self._clock()
        self.is_stalled = False

    async def until_stalled(self) -> None:
        """Wait until the engine has stalled, or has been so for another limit since the last call.

        Waits for: the clock. Unblocked by: ``limit_s`` without progress, or cancellation.
        """
        while (left_s := self.limit_s - self.quiet_s) > 0:  # noqa: ASYNC110  (nothing: no event)
            await asyncio.sleep(left_s)
        self.is_stalled = True
        self._moved_at = self._clock()
