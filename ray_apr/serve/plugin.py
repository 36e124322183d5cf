"""What vLLM calls in each of its processes (entry point ``vllm.general_plugins``)."""

from __future__ import annotations

import functools
import logging
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading

logger = logging.getLogger(__name__)

BACKEND = "ray_apr"


@functools.cache
def register() -> None:
    """Make ray_apr's way to receive weights known, and tie an engine's life to its owner's.

    Harmless when repeated, as vLLM does.
    """
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    try:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "ray_apr.serve.receiver", "WeightReceiver"
        )
    except ValueError:
        logger.debug("weight transfer backend %s is registered already", BACKEND)
    # The reload reports layers without weights of their own (a tied head) as if they were missing.
    logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)
    _end_with_parent()


def _end_with_parent() -> None:
    """In a child process, die when the parent does: vLLM's engine core would outlive a kill -9."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def wait() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="end-with-parent", daemon=True).start()
