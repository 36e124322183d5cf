"""A function whose answer several threads want."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

_Made = TypeVar("_Made")


def once(make: Callable[[], _Made]) -> Callable[[], _Made]:
    """What calls a function once, and gives its answer to whoever asks; others wait meanwhile.

    Where it raises, who asks next calls it again.
    """
    lock = threading.Lock()
    made: list[_Made] = []

    def get() -> _Made:
        """Waits for: who calls the function. Unblocked by: its end."""
        with lock:
            if not made:
                made.append(make())
            return made[0]

    return get
