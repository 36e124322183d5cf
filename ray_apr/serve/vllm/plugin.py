"""What vLLM calls in each of its processes (entry point ``vllm.general_plugins``)."""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.metadata
import logging
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

logger = logging.getLogger(__name__)

BACKEND = "ray_apr"
_GROUP = "vllm.general_plugins"

_ERROR_FILE = "RAY_APR_FIRST_ERROR_FILE"
_LONGEST_ERROR = 100_000
"""Bytes."""
_END_TAKES_S = 60.0
"""From the first error of a core that ends to the question why it has; vLLM takes seconds."""


def why_not_loaded() -> str | None:
    """Why vLLM would not call `register` in the processes that it starts here; None if it would."""
    points = importlib.metadata.entry_points(group=_GROUP)
    names = {point.name for point in points if point.value == f"{__name__}:register"}
    if not names:
        return (
            f"ray_apr is on the path, but not installed: there is no entry point {_GROUP}, by "
            "which vLLM finds how weights are received; run pip install --no-deps -e . in its "
            "checkout, on every node"
        )
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and not names & set(allowed.split(",")):
        return f"VLLM_PLUGINS={allowed} leaves out {', '.join(names)}; add it, or unset it"
    return None


@functools.cache
def register() -> None:
    """Make ray_apr's way to receive weights known, and tie an engine's life to its owner's.

    Harmless when repeated, as vLLM does.
    """
    from ray_apr.serve.vllm.private import WeightTransferEngineFactory

    try:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "ray_apr.serve.vllm.receiver", "WeightReceiver"
        )
    except ValueError:
        logger.debug("weight transfer backend %s is registered already", BACKEND)
    # The reload reports layers without weights of their own (a tied head) as if they were missing;
    # `reload` says which parameters got none.
    logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)
    # And it warns of any scheduler that is not vLLM's.
    logging.getLogger("vllm.config.scheduler").setLevel(logging.ERROR)
    _end_with_parent()
    _end_at_once()
    _keep_first_error()


def _end_with_parent() -> None:
    """In a child process, die when the parent does: vLLM's engine core would outlive a kill -9."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def wait() -> None:
        """End this process after its parent.

        Waits for: the parent's end. Unblocked by: that, or the end of this process.
        """
        multiprocessing.connection.wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="end-with-parent", daemon=True).start()


def _end_at_once() -> None:
    """In a child process, end without freeing all modules, which takes seconds of a whole core;
    vLLM itself has taken down what it has by then, and kills its core five seconds later."""
    if multiprocessing.parent_process() is None:
        return

    def end() -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    atexit.register(end)


class FirstError:
    """The first error that vLLM logs in its core process shortly before its end: why it could not
    start, or has died. One of long before is not its cause: calls that fail have theirs.

    vLLM itself raises only that the root cause is to be found in the log. The error is in a file in
    memory, which the core process opens by this process's number for it.
    """

    def __init__(self) -> None:
        self._file = os.memfd_create("ray-apr-first-error")

    @contextlib.contextmanager
    def of_processes(self) -> Iterator[None]:
        """Of those that start in the block."""
        os.environ[_ERROR_FILE] = f"/proc/{os.getpid()}/fd/{self._file}"
        try:
            yield
        finally:
            del os.environ[_ERROR_FILE]

    def read(self) -> str:
        """What it says; empty if there is none."""
        said = os.pread(self._file, _LONGEST_ERROR, 0).decode(errors="replace")
        return "" if _is_old(said) else said.partition("\n")[2]

    def close(self) -> None:
        """Forget it; nothing reads it any more."""
        os.close(self._file)


def _is_old(said: str) -> bool:
    """Whether an error in the file of `FirstError` is of another end; none is. Its first line is
    the time, by a clock that all processes of a machine share."""
    return time.monotonic() - float(said.partition("\n")[0] or "-inf") > _END_TAKES_S


def _keep_first_error() -> None:
    """In a child process, write the first error that vLLM logs, for `FirstError`."""
    name = os.environ.get(_ERROR_FILE)
    if name is None or multiprocessing.parent_process() is None:
        return
    path = Path(name)

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            error = record.exc_info[1] if record.exc_info else None
            with contextlib.suppress(OSError):  # its reader is gone
                if error is not None and _is_old(path.read_text("utf-8", "replace")):
                    said = f"{time.monotonic()}\n{type(error).__name__}: {error}"
                    path.write_text(said, "utf-8", "backslashreplace")  # a file may have any name

    logging.getLogger("vllm").addHandler(Keep(level=logging.ERROR))
