"""vLLM's Ray executor, in the namespace of the run and beside others; for engines of several GPUs.

vLLM's engine core opens Ray again, and would do so in an anonymous namespace.
"""

from __future__ import annotations

import os

import ray

from ray_apr.serve.vllm.private import RayExecutorV2, get_open_port

NAMESPACE = "RAY_APR_NAMESPACE"
"""Environment variable that carries the namespace into the engine core."""


class NamespacedRayExecutor(RayExecutorV2):  # type: ignore[misc]
    """Joins Ray in the run's namespace before vLLM would do so without one."""

    def _init_executor(self) -> None:
        if not ray.is_initialized():
            ray.init(address="auto", namespace=os.environ[NAMESPACE])
        super()._init_executor()

    @staticmethod
    def _select_tcpstore_port(*_: object) -> int:
        """A random port: vLLM 0.26 looks from port 100 on, where engines of one host collide."""
        port: int = get_open_port()
        return port
