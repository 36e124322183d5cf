"""How long a part of the loop took, and when."""

from __future__ import annotations

import time

from ray_apr.core.clock import unix_s


class Span:
    """Measures a block: `start_s` and `end_s` in Unix seconds, `duration_s` by the clock."""

    def __enter__(self) -> Span:
        self.start_s = self.end_s = unix_s()
        self.duration_s = 0.0
        self._begin = time.perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        self.duration_s = time.perf_counter() - self._begin
        self.end_s = self.start_s + self.duration_s
