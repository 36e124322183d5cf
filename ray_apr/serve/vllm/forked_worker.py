"""vLLM's executor for an engine of one GPU: its worker is a process, forked from the engine core.

In the core's own process the worker would wait for its scheduling, and that for the worker's
launches: both are Python. Forked, it has what the core has imported; inside of a Ray actor vLLM
would spawn it, and it would import all of that again.
"""

from __future__ import annotations

import os

from ray_apr.serve.vllm.private import MultiprocExecutor

_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
"""vLLM's variable of how the core starts its workers; in a server it says "spawn"."""


class ForkedWorkerExecutor(MultiprocExecutor):  # type: ignore[misc]
    """Forks its worker: the core, from which it is made, has used no device."""

    def _init_executor(self) -> None:
        os.environ[_METHOD] = "fork"
        super()._init_executor()
