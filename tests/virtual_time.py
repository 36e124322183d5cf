"""An event loop whose clock jumps to the next timer: hours of waiting in a moment."""

from __future__ import annotations

import asyncio
import selectors
import time


class _Selector(selectors.DefaultSelector):
    """Moves the clock instead of sleeping."""

    now = 1_000.0

    def select(self, timeout=None):
        found = super().select(0)
        if not found:
            assert timeout is not None, "nothing would ever happen"
            self.now += timeout
        return found


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop in virtual time; what it runs must not wait for threads."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        """Seconds that have passed here."""
        return self._virtual.now


def run_in_virtual_time(monkeypatch, work) -> None:
    """Run ``work()`` to its end, with `time.monotonic` as the loop has it."""
    loop = VirtualLoop()
    monkeypatch.setattr(time, "monotonic", loop.time)
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(work())
