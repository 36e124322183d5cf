"""Which failures stop a run, and what is said of engines that are gone.

Invariants:
    * What fails of one cause while it was under way together is one failure (`FailureCount`): a
      dead judge counts once, however many samples waited for it. Generations, steps and rewards
      are rows of their own, so that responses which end well do not hide that no reward does.
    * An engine that is gone is told once, and once more when its samples go on (`Outage`).

Pure: no I/O but the log, no ray, no torch.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable

from ray_apr.core.exceptions import (
    APRError,
    EngineUnavailableError,
    UserCodeError,
    one_line,
)

logger = logging.getLogger(__name__)

_MOST_CHARS = 500
"""Of the line of a failure: an error may hold the response that it was raised for."""


class FailureCount:
    """Counts failures in a row, of one kind of attempts.

    A failure counts unless its attempt had begun before the last failure of the same cause was
    counted. A success begins the row anew.

    Args:
        what: The attempts, in the plural.

    Example:
        >>> count = FailureCount("rewards")
        >>> began = count.now
        >>> [count.failed("no judge", began) for _ in range(32)][-1]
        1
        >>> count.failed("no judge", count.now)
        2
    """

    def __init__(self, what: str) -> None:
        self.what = what
        self.now = 0
        """When an attempt begins, in failures counted before."""
        self._in_a_row = 0
        self._counted_at: dict[str, int] = {}

    def failed(self, cause: str, began: int) -> int:
        """Take a failure; returns how many there are in a row.

        Args:
            cause: See `cause_of`.
            began: What `now` was when the attempt began.
        """
        if began >= self._counted_at.get(cause, 0):
            self.now += 1
            self._in_a_row += 1
            self._counted_at[cause] = self.now
        return self._in_a_row

    def succeeded(self) -> None:
        """Take a success."""
        self._in_a_row = 0
        self._counted_at.clear()


def cause_of(error: Exception, sample_id: str) -> str:
    """What an error says, but for the sample that it happened to."""
    if isinstance(error, UserCodeError):
        return f"{type(error).__name__} {error.kind}: {error.detail}"
    named = rf"{re.escape(sample_id)}(#\d+)?"
    return f"{type(error).__name__}: {re.sub(named, '…', one_line(error))}"


def told(error: Exception, sample_id: str) -> str:
    """What is said of a failure in a row of ``dropped.jsonl``: one line that names the sample."""
    text = one_line(error)
    if not isinstance(error, UserCodeError):  # which names it by itself
        text = f"sample {sample_id}: {type(error).__name__}: {text}"
    return text if len(text) <= _MOST_CHARS else f"{text[: _MOST_CHARS - 1]}…"


class Outage:
    """Samples that wait for an engine because theirs is gone: logged when they begin to, and when
    all of them go on.

    Args:
        clock: Seconds.
    """

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        self._clock = clock or time.monotonic
        self._began_at = 0.0
        self._waiting: set[str] = set()
        self._seen: set[str] = set()
        self._num_tries = 0
        self.reason = ""
        """What the first of those that wait now met with; empty where none waits."""

    def failed(self, sample_id: str, error: Exception) -> None:
        """A sample found no engine."""
        if not self._waiting:
            self._began_at, self._num_tries, self._seen = self._clock(), 0, set()
            self.reason = one_line(error)
            logger.warning("samples wait for an engine: %s", self.reason)
        self._num_tries += 1
        self._waiting.add(sample_id)
        self._seen.add(sample_id)

    def before(self, reason: APRError) -> APRError:
        """Why the run ends; of engines that are gone, with what samples met with first."""
        if isinstance(reason, EngineUnavailableError) and self.reason:
            return type(reason)(f"{self.reason.rstrip('.')}; then {reason}")
        return reason

    def ended(self, sample_id: str) -> None:
        """A sample has got an engine, or is gone."""
        if sample_id not in self._waiting:
            return
        self._waiting.discard(sample_id)
        if not self._waiting:
            self.reason = ""
            logger.warning(
                "%d samples have an engine again after %.0f s and %d tries",
                len(self._seen),
                self._clock() - self._began_at,
                self._num_tries,
            )
