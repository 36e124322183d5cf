"""Work on a thread that no process waits for at its end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


def in_thread(work: Callable[[], Result], name: str) -> Future[Result]:
    """Begin work on a daemon thread of its own; the threads of an executor keep their process.

    Args:
        work: A function of no argument.
        name: Of the thread.

    Returns:
        The future of its result, which has the error that it ends with, too.
    """
    future: Future[Result] = Future()

    def run() -> None:
        """Waits for: the work. Unblocked by: its end, or that of the process. Produces: a result
        or an error."""
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001  (it goes to who asks for the result)
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
