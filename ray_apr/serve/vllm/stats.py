"""How loaded a vLLM engine is and how far it has come, as its own scheduler reports it; and the
same as metrics of Ray."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_MOST_LATENCIES = 8
"""Latencies between two tokens that are exported of one step. All requests of a step wait for the
same step; and a value costs 16 µs, which for each token of 256 requests is 4 ms a step."""


class EngineLoad:
    """The newest figures of one engine's scheduler.

    Args:
        on_progress: Called when tokens have come, or a prefill has gone on.
        on_step: Gets the figures of each step, too; None: nobody does.

    Attributes:
        num_tokens: Tokens that have come since the start, those of calls under way included.
        num_queued: Requests that wait for a place or for KV entries.
        kv_usage: Share of the KV cache in use.
        num_preempted: Requests that lost their KV entries to others, since the start.
    """

    def __init__(
        self,
        on_progress: Callable[[], None],
        on_step: Callable[[Any, Any], None] | None = None,
    ) -> None:
        self._on_progress = on_progress
        self._on_step = on_step
        self.num_tokens = 0
        self.num_queued = 0
        self.kv_usage = 0.0
        self.num_preempted = 0

    def take(self, scheduler_stats: Any, iteration_stats: Any) -> None:
        """Take vLLM's figures of one step; either may be missing."""
        has_moved = False
        if scheduler_stats is not None:
            has_moved = scheduler_stats.kv_cache_usage != self.kv_usage
            self.num_queued = scheduler_stats.num_waiting_reqs
            self.kv_usage = scheduler_stats.kv_cache_usage
        if iteration_stats is not None:
            has_moved = has_moved or iteration_stats.num_generation_tokens > 0
            self.num_tokens += iteration_stats.num_generation_tokens
            self.num_preempted += iteration_stats.num_preempted_reqs
        if has_moved:
            self._on_progress()
        if self._on_step is not None:
            self._on_step(scheduler_stats, iteration_stats)

    def make_logger(self) -> Callable[..., Any]:
        """What ``AsyncLLM`` takes as a stat logger: it writes into this object at every step."""
        from ray_apr.serve.vllm.private import StatLoggerBase

        load = self

        class LoadLogger(StatLoggerBase):  # type: ignore[misc]  # vLLM is untyped here
            """Keeps the newest figures, and logs nothing."""

            def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
                del vllm_config, engine_index

            def record(
                self, scheduler_stats: Any, iteration_stats: Any, *args: Any, **kwargs: Any
            ) -> None:
                """Take the figures of one step; either may be missing."""
                del args, kwargs  # they differ between versions of vLLM
                load.take(scheduler_stats, iteration_stats)

            def log_engine_initialized(self) -> None:
                """Say nothing."""

        return LoadLogger


def exporting_logger() -> type:
    """What ``AsyncLLM`` takes as a stat logger that exports vLLM's own metrics through Ray, as
    ``ray_vllm_...`` with the tag ``ReplicaId``."""
    from ray_apr.serve.vllm.private import RayPrometheusStatLogger

    class ExportingLogger(RayPrometheusStatLogger):  # type: ignore[misc]  # vLLM is untyped here
        """Thins out the one metric that has a value for each token."""

        def record(
            self, scheduler_stats: Any, iteration_stats: Any, *args: Any, **kwargs: Any
        ) -> None:
            """Export the figures of one step; either may be missing."""
            if iteration_stats is None:
                super().record(scheduler_stats, iteration_stats, *args, **kwargs)
                return
            latencies = iteration_stats.inter_token_latencies_iter
            stride = -(-len(latencies) // _MOST_LATENCIES) or 1
            iteration_stats.inter_token_latencies_iter = latencies[::stride]
            try:
                super().record(scheduler_stats, iteration_stats, *args, **kwargs)
            finally:  # another logger may look at them
                iteration_stats.inter_token_latencies_iter = latencies

    return ExportingLogger
