"""All metrics of ray_apr, declared once: ``apr_<component>_<what>_<unit>``.

Ray shows them on its dashboard and exports them to Prometheus as ``ray_apr_...``. Names hold no
slash, because Ray drops those. Importing this module does not load ray.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["counter", "gauge", "histogram"]

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric: what it is called, what it counts, and by which tags."""

    name: str
    kind: Kind
    description: str
    tag_keys: tuple[str, ...] = ()


SPECS: tuple[MetricSpec, ...] = (
    MetricSpec("apr_rollout_generated_tokens", "counter", "Response tokens received."),
    MetricSpec("apr_rollout_inflight_samples", "gauge", "Samples in the engines."),
    MetricSpec("apr_rollout_held_samples", "gauge", "Interrupted samples waiting to be resumed."),
    MetricSpec("apr_rollout_interruptions", "counter", "Samples stopped before their end."),
    MetricSpec("apr_rollout_resumptions", "counter", "Interrupted samples continued."),
    MetricSpec("apr_rollout_discarded_tokens", "counter", "Tokens dropped.", ("reason",)),
    MetricSpec("apr_reward_duration_seconds", "histogram", "Time of one reward, queue included."),
    MetricSpec("apr_environment_duration_seconds", "histogram", "Time of one environment step."),
    MetricSpec("apr_reward_failures", "counter", "Rewards and steps that failed.", ("kind",)),
    MetricSpec("apr_buffer_samples", "gauge", "Scored samples waiting for the trainer."),
    MetricSpec("apr_buffer_evicted_samples", "counter", "Samples dropped for age."),
    MetricSpec("apr_buffer_masked_tokens", "counter", "Tokens of trained groups not in the loss."),
    MetricSpec("apr_trainer_policy_version", "gauge", "Optimizer steps done."),
    MetricSpec("apr_trainer_reward_mean", "gauge", "Mean reward of the last batch."),
    MetricSpec("apr_trainer_staleness_mean_steps", "gauge", "Mean staleness of the last batch."),
    MetricSpec("apr_trainer_staleness_max_steps", "gauge", "Largest staleness of the last batch."),
    MetricSpec("apr_trainer_step_seconds", "histogram", "Forward, backward and optimizer."),
    MetricSpec("apr_trainer_wait_seconds", "histogram", "Wait for the batch of one step."),
    MetricSpec("apr_trainer_sync_wait_seconds", "histogram", "Wait of one step for weight syncs."),
    MetricSpec("apr_weight_sync_seconds", "histogram", "Pause, broadcast, load, resume."),
    MetricSpec("apr_server_running_requests", "gauge", "Requests in an engine.", ("replica",)),
)


class Metrics:
    """The metrics of one process; each Ray metric is made at its first use."""

    def __init__(self) -> None:
        self._specs = {spec.name: spec for spec in SPECS}
        self._made: dict[str, Any] = {}

    def add(self, name: str, value: float = 1.0, **tags: str) -> None:
        """Raise a counter; zero is ignored."""
        if value > 0:
            self._get(name, "counter").inc(value, tags=tags or None)

    def set(self, name: str, value: float, **tags: str) -> None:
        """Set a gauge."""
        self._get(name, "gauge").set(value, tags=tags or None)

    def observe(self, name: str, value: float, **tags: str) -> None:
        """Add an observation to a histogram."""
        self._get(name, "histogram").observe(value, tags=tags or None)

    def set_all(self, values: Mapping[str, float]) -> None:
        """Set several gauges."""
        for name, value in values.items():
            self.set(name, value)

    def _get(self, name: str, kind: Kind) -> Any:
        if name not in self._made:
            from ray.util import metrics as ray_metrics  # loads ray: only inside a process of a run

            spec = self._specs[name]
            if spec.kind != kind:
                raise TypeError(f"metric {name} is a {spec.kind}, not a {kind}")
            extra = {"boundaries": list(_SECONDS)} if kind == "histogram" else {}
            maker = getattr(ray_metrics, kind.capitalize())
            self._made[name] = maker(name, spec.description, tag_keys=spec.tag_keys, **extra)
        return self._made[name]
