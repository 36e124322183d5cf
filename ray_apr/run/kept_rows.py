"""Which rows of a run folder stay where a run goes on: those of what it does not do again.

A row has a policy version, by which it may be of what comes again. That alone says too little: a
checkpoint that was taken while steps were trained again has samples of later versions than its own,
and what goes on may have had its row after the checkpoint, under the same version.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray_apr.data.resumption import Begin
from ray_apr.scheduling.order import prompt_position


class KeptRows:
    """The rows of samples that have ended and of groups that were dropped.

    Args:
        begin: Where the run goes on.
    """

    def __init__(self, begin: Begin) -> None:
        self._newest = -1 if begin.checkpoint is None else begin.policy_version
        self._rollout = begin.rollout
        self._pending = set(begin.rollout.pending) if begin.rollout else set()
        self._ended, self._dropped = set[str](), set[str]()
        self._unfinished, self._alive = set[str](), set[str]()
        if begin.replayed is not None:
            self._ended |= {row["sample_id"] for row in begin.replayed.ended}
            self._dropped |= {row["group_id"] for row in begin.replayed.dropped}
        if begin.samples is not None:
            names = ("sample_id", "finish_reason", "group_id")
            columns = (begin.samples[name].to_pylist() for name in names)
            for sample_id, reason, group_id in zip(*columns, strict=True):
                (self._ended if reason else self._unfinished).add(sample_id)
                self._alive.add(group_id)
            self._unfinished -= self._ended

    def of_ended(self, row: Mapping[str, Any]) -> bool:
        """Whether a row of a sample that has ended stays."""
        sample_id: str = row["sample_id"]
        if sample_id in self._unfinished:
            return False
        is_known = row["policy_version"] <= self._newest or sample_id in self._ended
        return is_known or self._is_over(sample_id.rpartition("-")[0])

    def of_dropped(self, row: Mapping[str, Any]) -> bool:
        """Whether a row of a group that was dropped stays."""
        group_id: str = row["group_id"]
        if group_id in self._alive:
            return False
        is_known = row["policy_version"] <= self._newest or group_id in self._dropped
        return is_known or self._is_over(group_id)

    def _is_over(self, group_id: str) -> bool:
        """Whether a prompt was handed out and does not come again."""
        if self._rollout is None:
            return False
        position = prompt_position(group_id, self._rollout.num_prompts)
        return position < self._rollout.position and position not in self._pending
