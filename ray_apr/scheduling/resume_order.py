"""Resume orders: which of the samples that have begun goes on first."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from ray_apr.scheduling.live import LiveSample


class ResumeOrder(Protocol):
    """Ranks samples that have begun; a function of one argument is a resume order, too.

    Example:
        >>> class FewestTokensLeft:
        ...     def __call__(self, live):
        ...         return live.sample.remaining_budget
    """

    def __call__(self, live: LiveSample) -> Any:
        """The rank of a sample that waits to go on, asked for when it begins to wait.

        Args:
            live: With its tokens; not to be changed.

        Returns:
            Anything that can be compared with other ranks. The lowest goes on first; of equal ones
            the sample that was admitted first.
        """
        ...


def oldest_version(live: LiveSample) -> int:
    """The one with the oldest token."""
    return live.sample.oldest_version or 0


def fifo(live: LiveSample) -> int:
    """The one that was interrupted first."""
    return live.queued


def most_tokens(live: LiveSample) -> int:
    """The one with the most tokens."""
    return -live.sample.num_tokens


RESUME_ORDERS: Mapping[str, Callable[[LiveSample], Any]] = {
    "oldest_version": oldest_version,
    "fifo": fifo,
    "most_tokens": most_tokens,
}
"""Built-in orders by name."""
