"""Unix seconds that a step of the system's clock does not move.

What lasts or has a limit is measured with `time.monotonic` or `time.perf_counter`. Moments that
travel to other processes, as those of the timeline, are of `unix_s`: they agree over the hosts as
well as the hosts' clocks do, and the difference of two moments of one process is a duration.
A process that begins after a step has the new time.
"""

from __future__ import annotations

import time

_AT_ZERO = time.time() - time.monotonic()
"""Unix time at which the monotonic clock was 0, as this process read it once."""


def unix_s() -> float:
    """Unix time in seconds; never less than before in one process."""
    return _AT_ZERO + time.monotonic()
