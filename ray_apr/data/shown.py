"""What the buffer shows of groups that leave it: metrics, and rows of the run folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ray_apr.core.group import GroupMeta
from ray_apr.core.metrics import Metrics


def show_trained(metrics: Metrics, rows: Sequence[Mapping[str, Any]]) -> None:
    """Count the samples of a step that was trained.

    Args:
        metrics: Of the run.
        rows: Of `scheduling.stock.sample_rows`.
    """
    masked = sum(row["num_masked_tokens"] for row in rows)
    metrics.add("apr_buffer_masked_tokens", masked)
    metrics.add("apr_rollout_discarded_tokens", masked, reason="masked")
    metrics.add("apr_buffer_trained_tokens", sum(r["num_generated"] for r in rows) - masked)
    for row in rows:
        metrics.observe("apr_buffer_trained_response_tokens", row["num_generated"])
        if row["staleness"] is not None:
            metrics.observe("apr_buffer_trained_staleness_steps", row["staleness"])


def show_evicted(metrics: Metrics, groups: Sequence[GroupMeta]) -> list[dict[str, Any]]:
    """Count groups that were evicted; returns their rows of ``dropped.jsonl``."""
    for group in groups:
        metrics.add("apr_buffer_evicted_samples", len(group.samples))
        metrics.add("apr_rollout_discarded_tokens", group.num_generated, reason="stale")
    return [
        {
            "group_id": group.group_id,
            "reason": "stale",
            "policy_version": group.oldest_version,
            "num_generated": group.num_generated,
        }
        for group in groups
    ]
