"""What an engine does step by step while the trainer's step is profiled.

Nothing is kept of other steps. A step of the engine ends as its outputs come, and begins as the
ones before came, or as there was something to do again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from typing import Any

from ray_apr.core.clock import unix_s
from ray_apr.serve.vllm.activity import Activity

_MOST = 10_000
"""Steps that wait to be asked for, which they are once a second."""


class EngineSteps:
    """Steps of an engine under the policy versions of ``train.profile_steps``.

    Args:
        versions: Which: the trainer is at its step n, from 0, while engines have version n.
        policy_version: Tells that of the engine now.
        activity: Of the engine.
    """

    def __init__(
        self, versions: Collection[int], policy_version: Callable[[], int], activity: Activity
    ) -> None:
        self._versions = versions
        self._policy_version = policy_version
        self._activity = activity
        self._last = 0.0
        self._rows: deque[dict[str, Any]] = deque(maxlen=_MOST)

    def take(self, scheduler_stats: Any, iteration_stats: Any) -> None:
        """Take vLLM's figures of one step; either may be missing."""
        begin, self._last = max(self._last, self._activity.changed_at), unix_s()
        if scheduler_stats is None or iteration_stats is None:
            return
        if self._policy_version() not in self._versions:
            return
        num_prompt_tokens = iteration_stats.num_prompt_tokens
        self._rows.append(
            {
                "what": "prefill" if num_prompt_tokens else "decode",
                "start_s": begin,
                "end_s": self._last,
                "requests": scheduler_stats.num_running_reqs,
                "queued": scheduler_stats.num_waiting_reqs,
                "tokens": iteration_stats.num_generation_tokens,
                "prompt_tokens": num_prompt_tokens,
                "kv_usage": round(scheduler_stats.kv_cache_usage, 4),
            }
        )

    def drain(self) -> tuple[dict[str, Any], ...]:
        """Rows since the last call; times are Unix seconds."""
        rows = tuple(self._rows)
        self._rows.clear()
        return rows
