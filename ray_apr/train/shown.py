"""What rank 0 shows of a step: its metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray_apr.core.metrics import Metrics

GAUGES = {
    "policy_version": "apr_trainer_policy_version",
    "reward_mean": "apr_trainer_reward_mean",
    "staleness_mean": "apr_trainer_staleness_mean_steps",
    "staleness_max": "apr_trainer_staleness_max_steps",
    "loss": "apr_trainer_loss",
    "entropy": "apr_trainer_entropy_nats",
    "grad_norm": "apr_trainer_grad_norm",
    "kl_k3": "apr_trainer_kl_nats",
}
HISTOGRAMS = {
    "trainer_step_s": "apr_trainer_step_seconds",
    "trainer_wait_s": "apr_trainer_wait_seconds",
    "weight_sync_s": "apr_weight_sync_seconds",
    "weight_gather_s": "apr_weight_gather_seconds",
    "generation_stopped_s": "apr_weight_generation_stopped_seconds",
    "weight_wait_s": "apr_trainer_sync_wait_seconds",
}
_IF_ANY = ("weight_sync_s", "weight_gather_s", "generation_stopped_s")
"""Left out at 0, which says that there was none."""


def show_step(metrics: Metrics, row: Mapping[str, Any]) -> None:
    """Set the metrics of a step's row."""
    metrics.set_all({metric: row[key] for key, metric in GAUGES.items()})
    for key, metric in HISTOGRAMS.items():
        if row[key] or key not in _IF_ANY:
            metrics.observe(metric, row[key])
