"""What panels ask of Prometheus.

Invariants, which a test keeps:
    * A query names only metrics that exist: those of `metrics.SPECS` and of `VLLM_METRICS`.
    * Each query is of the runs that are chosen (``$run``), or of their engines (``$replica``).
"""

from __future__ import annotations

from dataclasses import dataclass

VLLM_METRICS = (
    "ray_vllm_generation_tokens_total",
    "ray_vllm_num_requests_running",
    "ray_vllm_num_requests_waiting",
    "ray_vllm_kv_cache_usage_perc",
    "ray_vllm_num_preemptions_total",
    "ray_vllm_inter_token_latency_seconds",
)
"""vLLM's own metrics that are shown, as Prometheus calls them (`serve.vllm.stats`)."""

RUN = 'run=~"$run"'
REPLICA = 'ReplicaId=~"$replica"'


@dataclass(frozen=True, slots=True)
class Query:
    """A query and the name of its lines."""

    expr: str
    legend: str


def gauge(name: str, legend: str) -> Query:
    """The last value of a gauge, of each run."""
    return Query(f"max by (run) (ray_apr_{name}{{{RUN}}})", f"{{{{run}}}} {legend}")


def rate(name: str, by: str = "", *, only: str = "") -> str:
    """Of a counter, a second; of the series with the labels `only`."""
    keys = f"run, {by}" if by else "run"
    labels = f"{RUN}, {only}" if only else RUN
    return f"sum by ({keys}) (rate(ray_apr_{name}{{{labels}}}[$__rate_interval]))"


def or_zero(expr: str) -> str:
    """The same, and 0 for runs in which it has never happened: Ray exports no counter before."""
    return f"({expr}) or on (run) (0 * max by (run) (ray_apr_rollout_inflight_samples{{{RUN}}}))"


def mean(name: str, legend: str) -> Query:
    """Mean of a histogram's observations; without a point where there was none."""
    total, count = rate(f"{name}_sum"), rate(f"{name}_count")
    return Query(f"{total} / ({count} > 0)", f"{{{{run}}}} {legend}")


def quantile(q: float, name: str, legend: str) -> Query:
    """A quantile of a histogram, of each run."""
    return Query(
        f"histogram_quantile({q:g}, {rate(f'{name}_bucket', 'le')})", f"{{{{run}}}} {legend}"
    )


def share(name: str, activity: str) -> str:
    """Share of the time that goes to an activity."""
    spent = rate(name, only=f'activity="{activity}"')
    return f"{spent} / {rate(name)}"


def of_engines(name: str, legend: str = "{{ReplicaId}}") -> Query:
    """The last value of a gauge of vLLM's, of each engine."""
    return Query(f"max by (ReplicaId) (ray_vllm_{name}{{{REPLICA}}})", legend)


def rate_of_engines(name: str) -> str:
    """Of a counter of vLLM's, a second, of each engine."""
    return f"sum by (ReplicaId) (rate(ray_vllm_{name}{{{REPLICA}}}[$__rate_interval]))"
