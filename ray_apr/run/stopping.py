"""Ctrl-C and SIGTERM: both end a run as `Stopped`, with its final figures written.

Ray kills a driver three seconds after a SIGTERM that Ray's own handler has seen (it sets an alarm
that aborts the process), and Ray Train makes a `SystemExit` of Ctrl-C. `StopSignals` takes both
signals over; it is to listen after `ray.init`, which installs handlers of its own. A run that has
failed, or trained all of its steps, first says so and takes its parts away.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from ray_apr.core.exceptions import Stopped


class StopSignals:
    """The two signals of this process while something listens; of the main thread only."""

    def __init__(self) -> None:
        self._told: int | None = None
        """The signal that came first."""
        self._waits = False
        """Whether the first one waits."""

    @contextlib.contextmanager
    def listen(self) -> Iterator[None]:
        """Turn either signal into `Stopped`, until the block ends; may be nested.

        A SIGTERM after the first signal is ignored, as the run is ending already; a second Ctrl-C
        raises again, for those who do not want to wait.
        """
        if threading.current_thread() is not threading.main_thread():
            yield  # Python delivers signals to the main thread alone
            return
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        for number in before:
            signal.signal(number, self._stop)
        try:
            yield
        except (KeyboardInterrupt, SystemExit) as error:
            # Ray raises a KeyboardInterrupt of its own where a handler raised one inside of it,
            # and both Ray's and Ray Train's handlers exit.
            if isinstance(error, Stopped):
                raise
            by_term = isinstance(error, SystemExit) and error.code == signal.SIGTERM
            self._told = self._told or (signal.SIGTERM if by_term else signal.SIGINT)
            raise Stopped(self._told) from error
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextlib.contextmanager
    def put_off(self) -> Iterator[None]:
        """Let a first signal wait for `check`; in the block a run says how it has ended."""
        self._waits = True
        try:
            yield
        finally:
            self._waits = False

    def check(self) -> None:
        """Raise what was put off: something is left that it ends.

        Raises:
            Stopped: If a signal came.
        """
        if self._told is not None:
            raise Stopped(self._told)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        is_first, self._told = self._told is None, self._told or number
        if (is_first and self._waits) or (not is_first and number == signal.SIGTERM):
            return
        self.check()
