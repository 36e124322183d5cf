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
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

logger = logging.getLogger(__name__)

BACKEND = "ray_apr"
_GROUP = "vllm.general_plugins"

_ERROR_FOLDER = "RAY_APR_START_ERROR_FOLDER"


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
    _keep_start_error()


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


@contextlib.contextmanager
def start_error() -> Iterator[Callable[[], str]]:
    """While an engine starts: a function that returns why its core process could not.

    vLLM itself raises only that the root cause is to be found in the log.
    """
    with tempfile.TemporaryDirectory(prefix="ray-apr-start-") as folder:
        os.environ[_ERROR_FOLDER] = folder
        reason = ""
        try:
            yield lambda: reason
        finally:
            del os.environ[_ERROR_FOLDER]
            for path in Path(folder).iterdir():
                reason = path.read_text()


def _keep_start_error() -> None:
    """In a child process, write the first error that vLLM logs: why it could not start."""
    folder = os.environ.get(_ERROR_FOLDER)
    if folder is None or multiprocessing.parent_process() is None:
        return

    path = Path(folder, "error")

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            error = record.exc_info[1] if record.exc_info else None
            if error is not None and path.parent.is_dir() and not path.exists():
                path.write_text(f"{type(error).__name__}: {error}")

    logging.getLogger("vllm").addHandler(Keep(level=logging.ERROR))
