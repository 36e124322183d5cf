"""What an engine was doing when: start, generate, paused or idle, as spans and as sums."""

from __future__ import annotations

from typing import Literal

from ray_apr.core.clock import unix_s
from ray_apr.serve.vllm.names import PARKING_LIMIT_S

What = Literal["start", "generate", "paused", "idle"]


class Activity:
    """Follows the number of running requests and the pauses of one engine."""

    def __init__(self) -> None:
        self.seconds: dict[What, float] = {"generate": 0.0, "paused": 0.0, "idle": 0.0}
        """Time spent since the start, in seconds; up to date after `drain`."""
        self.request_s = 0.0
        """Seconds of all requests while the engine was not paused; up to date after `drain`."""
        self._started_at = self._since = self._counted_at = unix_s()
        self.changed_at = self._since
        """When the engine began what it does now."""
        self.num_kept = 0
        """Requests that stay inside while their calls are interrupted by this pause."""
        self._kept_until = 0.0
        """By when they have other calls, or are ended."""
        self._num_running = 0
        self._is_paused = False
        self._spans: list[tuple[What, float, float]] = []

    def start(self) -> None:
        """The engine answers now; what was before is its start, and in no sum."""
        now = unix_s()
        self._spans = [("start", self._since, now)]
        self._started_at = self._since = self._counted_at = now

    @property
    def uptime_s(self) -> float:
        """Seconds since the start."""
        return unix_s() - self._started_at

    def set_running(self, num_running: int) -> None:
        """Tell how many requests the engine holds."""
        if bool(num_running) != bool(self._num_running):
            self._cut()
            self.changed_at = self._since
        self._count()
        self._num_running = num_running

    def set_paused(self, is_paused: bool) -> None:
        """Tell whether the engine is frozen."""
        if is_paused != self._is_paused:
            self._cut()
            self.changed_at = self._since
            self._kept_until = self._since + PARKING_LIMIT_S
        self._is_paused = is_paused

    def drain(self) -> tuple[tuple[What, float, float], ...]:
        """Spans (what, start, end) in Unix seconds since the last call."""
        self._cut()
        spans, self._spans = tuple(self._spans), []
        return spans

    @property
    def num_inside(self) -> int:
        """Requests that the engine holds; those that are kept count until they have had time to get
        other calls."""
        is_kept = unix_s() < self._kept_until
        return max(self._num_running, self.num_kept if is_kept else 0)

    def _cut(self) -> None:
        """Close the span that is open."""
        self._count()
        now = unix_s()
        what: What = "paused" if self._is_paused else "generate" if self.num_inside else "idle"
        self.seconds[what] += now - self._since
        last = self._spans[-1] if self._spans else None
        if last is not None and last[0] == what and last[2] == self._since:
            self._spans[-1] = (what, last[1], now)
        else:
            self._spans.append((what, self._since, now))
        self._since = now

    def _count(self) -> None:
        """Add the time of the requests that there have been since the last call."""
        now = unix_s()
        self.request_s += 0 if self._is_paused else self.num_inside * (now - self._counted_at)
        self._counted_at = now
