"""All metrics of ray_apr, declared once: ``apr_<component>_<what>_<unit>``.

Ray shows them on its dashboard and exports them to Prometheus (`MetricSpec.exported`). Names hold
no slash, because Ray drops those. Each metric has the tag ``run``, whose value a process sets once:
what a run adds to the number of series is bounded by its engines, reasons and activities. Importing
this module does not load ray.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["counter", "gauge", "histogram"]

RUN = "run"
"""Tag of every metric: the name of the run."""
_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)
_TOKENS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
_STEPS = (0.5, 1.5, 2.5, 3.5, 4.5, 6.5, 8.5, 12.5, 16.5)
"""Between whole numbers, as Ray takes no boundary of 0."""


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric: what it is called, what it counts, and by which tags beside `RUN`."""

    name: str
    kind: Kind
    description: str
    tag_keys: tuple[str, ...] = ()
    boundaries: tuple[float, ...] = _SECONDS
    """Upper bounds of a histogram's buckets, in its unit; nothing to the other kinds."""

    @property
    def all_tags(self) -> tuple[str, ...]:
        """Keys of all tags."""
        return (RUN, *self.tag_keys)

    @property
    def exported(self) -> str:
        """What Prometheus calls it; a histogram has ``_bucket``, ``_sum`` and ``_count`` of it."""
        return f"ray_{self.name}" + ("_total" if self.kind == "counter" else "")


SPECS: tuple[MetricSpec, ...] = (
    MetricSpec("apr_rollout_generated_tokens", "counter", "Response tokens received."),
    MetricSpec(
        "apr_rollout_response_tokens",
        "histogram",
        "Generated tokens of a response that came to its end.",
        boundaries=_TOKENS,
    ),
    MetricSpec("apr_rollout_inflight_samples", "gauge", "Samples in the engines."),
    MetricSpec("apr_rollout_inflight_limit_samples", "gauge", "Most samples in the engines."),
    MetricSpec("apr_rollout_held_samples", "gauge", "Interrupted samples waiting to be resumed."),
    MetricSpec("apr_rollout_unfinished_samples", "gauge", "Samples in flight, held or waiting."),
    MetricSpec(
        "apr_rollout_unfinished_limit_samples",
        "gauge",
        "Unfinished samples, those held among them, beyond which no group starts.",
    ),
    MetricSpec("apr_rollout_interruptions", "counter", "Samples stopped before their end."),
    MetricSpec("apr_rollout_resumptions", "counter", "Interrupted samples continued."),
    MetricSpec("apr_rollout_discarded_tokens", "counter", "Tokens dropped.", ("reason",)),
    MetricSpec("apr_reward_duration_seconds", "histogram", "Time of one reward, queue included."),
    MetricSpec("apr_environment_duration_seconds", "histogram", "Time of one environment step."),
    MetricSpec("apr_reward_failures", "counter", "Rewards and steps that failed.", ("kind",)),
    MetricSpec("apr_buffer_samples", "gauge", "Scored samples waiting for the trainer."),
    MetricSpec("apr_buffer_limit_samples", "gauge", "Most samples that may wait or be trained."),
    MetricSpec(
        "apr_buffer_batch_wait_seconds",
        "gauge",
        "How long the trainer has waited for its batch; 0 while it has one.",
    ),
    MetricSpec("apr_buffer_evicted_samples", "counter", "Samples dropped for age."),
    MetricSpec("apr_buffer_masked_tokens", "counter", "Tokens of trained groups not in the loss."),
    MetricSpec("apr_buffer_trained_tokens", "counter", "Tokens that entered the loss."),
    MetricSpec(
        "apr_buffer_trained_response_tokens",
        "histogram",
        "Generated tokens of a trained response.",
        boundaries=_TOKENS,
    ),
    MetricSpec(
        "apr_buffer_trained_staleness_steps",
        "histogram",
        "Staleness of a trained sample, by its oldest token in the loss.",
        boundaries=_STEPS,
    ),
    MetricSpec("apr_trainer_policy_version", "gauge", "Batches trained."),
    MetricSpec("apr_trainer_reward_mean", "gauge", "Mean reward of the last batch."),
    MetricSpec("apr_trainer_loss", "gauge", "Loss of the last batch."),
    MetricSpec("apr_trainer_entropy_nats", "gauge", "Mean entropy of a token of the last batch."),
    MetricSpec("apr_trainer_grad_norm", "gauge", "Gradient norm of the last batch."),
    MetricSpec("apr_trainer_kl_nats", "gauge", "KL (k3) of trainer and engines, last batch."),
    MetricSpec("apr_trainer_staleness_mean_steps", "gauge", "Mean staleness of the last batch."),
    MetricSpec("apr_trainer_staleness_max_steps", "gauge", "Largest staleness of the last batch."),
    MetricSpec("apr_trainer_step_seconds", "histogram", "Forward, backward and optimizer."),
    MetricSpec("apr_trainer_wait_seconds", "histogram", "Wait for the batch of one step."),
    MetricSpec("apr_trainer_sync_wait_seconds", "histogram", "Wait of one step for weight syncs."),
    MetricSpec(
        "apr_trainer_activity_seconds",
        "counter",
        "What rank 0 spent its time on: load, compile, wait, switch, train, sync, checkpoint.",
        ("activity",),
    ),
    MetricSpec("apr_weight_sync_seconds", "histogram", "A whole sync, from gather to resume."),
    MetricSpec("apr_weight_gather_seconds", "histogram", "Gather of the weights for one sync."),
    MetricSpec(
        "apr_weight_generation_stopped_seconds",
        "histogram",
        "From the first pause to the last resume of one sync.",
    ),
    MetricSpec("apr_server_running_requests", "gauge", "Requests in an engine.", ("replica",)),
    MetricSpec(
        "apr_server_activity_seconds",
        "counter",
        "What an engine spent its time on since its start: generate, paused, idle.",
        ("replica", "activity"),
    ),
    MetricSpec("apr_evaluation_reward_mean", "gauge", "Mean reward of the last evaluation."),
    MetricSpec("apr_evaluation_policy_version", "gauge", "Version that was evaluated last."),
    MetricSpec(
        "apr_evaluation_samples", "counter", "Responses evaluated: scored or failed.", ("outcome",)
    ),
)


class Metrics:
    """The metrics of one process; each Ray metric is made at its first use.

    Args:
        run: Name of the run, the value of the tag `RUN`.
    """

    def __init__(self, run: str) -> None:
        self._run = run
        self._specs = {spec.name: spec for spec in SPECS}
        self._made: dict[str, Any] = {}
        self._totals: dict[tuple[str, ...], float] = {}

    def add(self, name: str, value: float = 1.0, **tags: str) -> None:
        """Raise a counter; zero is ignored."""
        if value > 0:
            self._get(name, "counter").inc(value, tags=tags or None)

    def raise_to(self, name: str, total: float, **tags: str) -> None:
        """Raise a counter to a total that is kept elsewhere and only grows."""
        key = (name, *sorted(tags.values()))
        self.add(name, total - self._totals.get(key, 0.0), **tags)
        self._totals[key] = max(total, self._totals.get(key, 0.0))

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
            extra = {"boundaries": list(spec.boundaries)} if kind == "histogram" else {}
            maker = getattr(ray_metrics, kind.capitalize())
            made = maker(name, spec.description, tag_keys=spec.all_tags, **extra)
            self._made[name] = made.set_default_tags({RUN: self._run})
        return self._made[name]
