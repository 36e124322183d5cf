"""vLLM's Ray executor, in the namespace of the run and beside others; for engines of several GPUs.

vLLM's engine core opens Ray again, and would do so in an anonymous namespace.

Invariants:
    * A call of all workers that is part of a weight sync, or has them sleep, ends once all have
      answered, also with an error. vLLM ends it with the first error and leaves the other answers
      in their queues, where each later call takes them for its own: another try of a sync fails of
      the last one's error, and from then on workers that have failed count as those that have their
      weights. Other calls, as those of the start, end with the first error, and the engine with it:
      the other workers may wait for the failed one.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import ray

from ray_apr.core.exceptions import SYNC_BROKEN
from ray_apr.serve.vllm.private import RayExecutorV2, get_open_port

NAMESPACE = "RAY_APR_NAMESPACE"
"""Environment variable that carries the namespace into the engine core."""
_HEARD_OUT = {
    "init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update",
    "sleep", "wake_up",
}  # fmt: skip
"""Calls after whose error an engine goes on."""
_LOOK_S = 1.0
"""Between looks whether a worker has died, of those that have not answered where one has failed."""


class NamespacedRayExecutor(RayExecutorV2):  # type: ignore[misc]
    """Joins Ray in the run's namespace before vLLM would do so without one."""

    response_mqs: Any
    """Queues of the workers' answers."""

    def _init_executor(self) -> None:
        if not ray.is_initialized():
            ray.init(address="auto", namespace=os.environ[NAMESPACE])
        super()._init_executor()

    def collective_rpc(self, method: Any, *given: Any, **options: Any) -> Any:
        """Call all workers; see vLLM's.

        Waits for: all workers. Unblocked by: their answers, for which a weight sync has a limit, or
        the death of any, which ends vLLM's core.

        Raises:
            RuntimeError: What has failed in any of them; where one has failed for good, of which
                the others' weight sync breaks off, that alone.
        """
        if method not in _HEARD_OUT:
            return super().collective_rpc(method, *given, **options)
        queues, errors = self.response_mqs, list[str]()
        self.response_mqs = [_Answers(queue, errors, lambda: self.is_failed) for queue in queues]
        try:
            answers = super().collective_rpc(method, *given, **options)
        except TimeoutError:  # of one that does not answer any more: the error says more
            if not errors:
                raise
        finally:
            self.response_mqs = queues
        if errors:
            causes = [error for error in errors if SYNC_BROKEN not in error] or errors
            raise RuntimeError(f"workers failed: {'; '.join(dict.fromkeys(causes))}")
        return answers

    @staticmethod
    def _select_tcpstore_port(*_: object) -> int:
        """A random port: vLLM 0.26 looks from port 100 on, where engines of one host collide."""
        port: int = get_open_port()
        return port


class _Answers:
    """The queue of a worker's answers, whose errors are raised once all workers have answered.

    Args:
        queue: vLLM's.
        errors: Of all workers.
        has_failed: Whether a worker has died.
    """

    def __init__(self, queue: Any, errors: list[str], has_failed: Callable[[], bool]) -> None:
        self._queue = queue
        self._errors = errors
        self._has_failed = has_failed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)

    def dequeue(self, timeout: float | None = None, **others: Any) -> Any:
        """Take the next answer, an error as if it were none.

        Waits for: the worker. Unblocked by: its answer, for which a weight sync has a limit, or,
        after another worker's error, the death of any.
        """
        looks = bool(self._errors) and timeout is None
        while True:
            try:
                given = _LOOK_S if looks else timeout
                status, result = self._queue.dequeue(timeout=given, **others)
                break
            except TimeoutError:
                if not looks or self._has_failed():
                    raise
        if status is not (succeeded := type(status).SUCCESS):
            self._errors.append(str(result))
        return succeeded, result
