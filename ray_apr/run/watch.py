"""A thread of the driver that looks at the cluster again and again, beside the train workers."""

from __future__ import annotations

import abc
import logging
import threading
from collections.abc import Callable
from typing import Self

from ray.exceptions import RayError

from ray_apr.core.exceptions import APRError, one_line
from ray_apr.run.causes import cause_of

logger = logging.getLogger(__name__)

LOOK_S = 1.0
CALL_TIMEOUT_S = 60.0


class Watch(abc.ABC):
    """Looks inside of a ``with`` block. What it does not expect ends the run.

    Args:
        what: It looks for; the thread's name.
        fail: Has the run end with a reason.
    """

    def __init__(self, what: str, fail: Callable[[APRError], None]) -> None:
        self._what = what
        self._fail = fail
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._follow, name=f"watch-{what}", daemon=True)

    @abc.abstractmethod
    def look(self) -> bool:
        """Look once; whether that was the last time."""

    @property
    def pause_s(self) -> float:
        """Until the next look."""
        return LOOK_S

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Look no more.

        Waits for: the thread. Unblocked by: `_closing`, or the limit of a call.
        """
        self._closing.set()
        self._thread.join(timeout=CALL_TIMEOUT_S)

    def _follow(self) -> None:
        """Consumes: what Ray says. Waits for: the clock. Unblocked by: the end of the block.
        Produces: what a look does; a failure."""
        while not self._closing.wait(self.pause_s):
            try:
                if self.look():
                    return
            except (RayError, TimeoutError) as error:  # the next look may succeed
                logger.warning("the watch of %s learns nothing: %s", self._what, one_line(error))
            except Exception as error:
                if not self._closing.is_set():
                    logger.exception("the watch of %s ends", self._what)
                    self._fail(cause_of(error))
                return
