"""Who uses this host's cores while something runs: CPU seconds by part of the system."""

from __future__ import annotations

import bisect
import time
from collections import Counter
from typing import Self

import host
import psutil

_EVERY_S = 0.5
_PARTS = {
    "VLLM::": "engine",
    "ray::ServeReplica": "engine",
    "ray::_RayTrainWorker": "trainer",
    "ray::RayTrainWorker": "trainer",
}
"""Beginning of a process title, and the part that it belongs to; all else is "other"."""


class CPUClock:
    """Looks at all processes below this one, twice a second, as long as its context lasts.

    A process that ends between two looks loses what it did after the first of them.
    """

    def __init__(self) -> None:
        self._times: list[float] = []
        self._totals: list[dict[str, float]] = []
        self._seen: dict[tuple[int, float], tuple[str, float]] = {}
        self._looking = host.looking(self._look, _EVERY_S)

    def __enter__(self) -> Self:
        self._look()
        self._looking.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._looking.__exit__(None, None, None)
        self._look()

    def between(self, begin: float, end: float) -> dict[str, float]:
        """CPU seconds of each part between two Unix times."""
        first, last = (bisect.bisect_left(self._times, t) for t in (begin, end))
        before = self._totals[min(first, len(self._totals) - 1)]
        after = self._totals[min(last, len(self._totals) - 1)]
        return {part: round(after[part] - before.get(part, 0.0), 2) for part in after}

    def _look(self) -> None:
        this = psutil.Process()
        for process in (this, *this.children(recursive=True)):
            try:
                with process.oneshot():
                    title = process.cmdline() or [process.name()]
                    spent = process.cpu_times()
                    key = (process.pid, process.create_time())
            except psutil.Error:
                continue  # it has ended
            part = next((p for t, p in _PARTS.items() if title[0].startswith(t)), "other")
            self._seen[key] = (part, spent.user + spent.system)
        totals: Counter[str] = Counter()
        for part, seconds in self._seen.values():
            totals[part] += seconds
        self._times.append(time.time())
        self._totals.append(dict(totals))
