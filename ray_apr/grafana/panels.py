"""The panels of the dashboard, in the order in which an operator asks.

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

_RUN = 'run=~"$run"'
_REPLICA = 'ReplicaId=~"$replica"'


@dataclass(frozen=True, slots=True)
class Query:
    """A query and the name of its lines."""

    expr: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """One plot."""

    title: str
    description: str
    unit: str
    """Grafana's name of the unit: s, percentunit, short, none."""
    queries: tuple[Query, ...]
    top: float | None = None
    """Upper end of the axis; None fits it to the lines."""


@dataclass(frozen=True, slots=True)
class Row:
    """Panels that answer one question."""

    title: str
    panels: tuple[Panel, ...]


def _gauge(name: str, legend: str) -> Query:
    return Query(f"max by (run) (ray_apr_{name}{{{_RUN}}})", f"{{{{run}}}} {legend}")


def _rate(name: str, by: str = "", *, only: str = "") -> str:
    """Of a counter, a second; of the series with the labels `only`."""
    keys = f"run, {by}" if by else "run"
    labels = f"{_RUN}, {only}" if only else _RUN
    return f"sum by ({keys}) (rate(ray_apr_{name}{{{labels}}}[$__rate_interval]))"


def _or_zero(expr: str) -> str:
    """The same, and 0 for runs in which it has never happened: Ray exports no counter before."""
    return f"({expr}) or on (run) (0 * max by (run) (ray_apr_rollout_inflight_samples{{{_RUN}}}))"


def _mean(name: str, legend: str) -> Query:
    """Mean of a histogram's observations; without a point where there was none."""
    total, count = _rate(f"{name}_sum"), _rate(f"{name}_count")
    return Query(f"{total} / ({count} > 0)", f"{{{{run}}}} {legend}")


def _quantile(q: float, name: str, legend: str) -> Query:
    return Query(
        f"histogram_quantile({q:g}, {_rate(f'{name}_bucket', 'le')})", f"{{{{run}}}} {legend}"
    )


def _share(name: str, activity: str) -> str:
    """Share of the time that goes to an activity."""
    spent = _rate(name, only=f'activity="{activity}"')
    return f"{spent} / {_rate(name)}"


def _of_engines(name: str, legend: str = "{{ReplicaId}}") -> Query:
    return Query(f"max by (ReplicaId) (ray_vllm_{name}{{{_REPLICA}}})", legend)


def _rate_of_engines(name: str) -> str:
    return f"sum by (ReplicaId) (rate(ray_vllm_{name}{{{_REPLICA}}}[$__rate_interval]))"


ROWS: tuple[Row, ...] = (
    Row(
        "Is it learning?",
        (
            Panel(
                "Reward",
                "Mean reward of the batch that was trained last.",
                "short",
                (_gauge("trainer_reward_mean", ""),),
            ),
            Panel(
                "Evaluation",
                "Mean reward of the held-out prompts at the version that was evaluated last.",
                "short",
                (_gauge("evaluation_reward_mean", ""),),
            ),
            Panel(
                "Policy version",
                "Batches trained, and the version that was evaluated last.",
                "none",
                (
                    _gauge("trainer_policy_version", "trained"),
                    _gauge("evaluation_policy_version", "evaluated"),
                ),
            ),
            Panel(
                "Loss",
                "Loss of the batch that was trained last.",
                "short",
                (_gauge("trainer_loss", ""),),
            ),
            Panel(
                "Gradient norm",
                "Before clipping, of the batch that was trained last.",
                "short",
                (_gauge("trainer_grad_norm", ""),),
            ),
            Panel(
                "Entropy (nats)",
                "Mean over the tokens of the batch. Towards 0 the policy no longer explores.",
                "short",
                (_gauge("trainer_entropy_nats", ""),),
            ),
        ),
    ),
    Row(
        "Is it fresh?",
        (
            Panel(
                "Staleness of the batch (steps)",
                "Mean and largest staleness of the batch; the largest never exceeds max_staleness.",
                "none",
                (
                    _gauge("trainer_staleness_mean_steps", "mean"),
                    _gauge("trainer_staleness_max_steps", "max"),
                ),
            ),
            Panel(
                "Staleness of trained samples (steps)",
                "Quantiles over the samples, by the oldest token in the loss.",
                "none",
                (
                    _quantile(0.5, "buffer_trained_staleness_steps", "median"),
                    _quantile(0.95, "buffer_trained_staleness_steps", "95 %"),
                ),
            ),
            Panel(
                "KL of trainer and engines (nats)",
                "k3 estimate per token: what staleness and numerics make of the log-probs.",
                "short",
                (_gauge("trainer_kl_nats", ""),),
            ),
        ),
    ),
    Row(
        "Who waits?",
        (
            Panel(
                "Idle share of the engines",
                "Share of the engines' time without any request, and of that in which a sync "
                "paused them.",
                "percentunit",
                (
                    Query(
                        _or_zero(_share("server_activity_seconds_total", "idle")), "{{run}} idle"
                    ),
                    Query(
                        _or_zero(_share("server_activity_seconds_total", "paused")),
                        "{{run}} paused",
                    ),
                ),
                top=1.0,
            ),
            Panel(
                "Idle share of the trainer",
                "Share of rank 0's time that goes to waiting for a batch and for weight syncs.",
                "percentunit",
                (
                    Query(_share("trainer_activity_seconds_total", "wait"), "{{run}} batch"),
                    Query(
                        _or_zero(_share("trainer_activity_seconds_total", "sync")), "{{run}} sync"
                    ),
                ),
                top=1.0,
            ),
            Panel(
                "The batch that is waited for",
                "How long the trainer has waited for its batch by now; it fails at "
                "buffer.wait_timeout_s if nothing moves.",
                "s",
                (_gauge("buffer_batch_wait_seconds", ""),),
            ),
            Panel(
                "Samples in the engines",
                "At the limit, partial_rollout.max_inflight holds generation back.",
                "short",
                (
                    _gauge("rollout_inflight_samples", "in flight"),
                    _gauge("rollout_inflight_limit_samples", "limit"),
                ),
            ),
            Panel(
                "Unfinished and held samples",
                "Held ones wait to be resumed. At the limit, oversampling_factor holds new "
                "groups back.",
                "short",
                (
                    _gauge("rollout_unfinished_samples", "unfinished"),
                    _gauge("rollout_held_samples", "held"),
                    _gauge("rollout_unfinished_limit_samples", "limit"),
                ),
            ),
            Panel(
                "Samples in the buffer",
                "Near the limit the trainer is the slower side, near 0 the engines are.",
                "short",
                (
                    _gauge("buffer_samples", "buffered"),
                    _gauge("buffer_limit_samples", "limit"),
                ),
            ),
            Panel(
                "Time of a reward",
                "From the end of a response to its reward, the queue included.",
                "s",
                (
                    _mean("reward_duration_seconds", "mean"),
                    _quantile(0.95, "reward_duration_seconds", "95 %"),
                ),
            ),
            Panel(
                "Time of an environment step",
                "From the end of a turn to the answer; 0 without an environment.",
                "s",
                (Query(_or_zero(_mean("environment_duration_seconds", "").expr), "{{run}} mean"),),
            ),
        ),
    ),
    Row(
        "What is lost?",
        (
            Panel(
                "Discarded tokens a second",
                "By reason: stale, masked, restarted, surplus, filtered, failed, shutdown.",
                "short",
                (
                    Query(
                        _or_zero(_rate("rollout_discarded_tokens_total", "reason")),
                        "{{run}} {{reason}}",
                    ),
                ),
            ),
            Panel(
                "Generated and trained tokens a second",
                "What lies between them is buffered, held or discarded.",
                "short",
                (
                    Query(_rate("rollout_generated_tokens_total"), "{{run}} generated"),
                    Query(_rate("buffer_trained_tokens_total"), "{{run}} trained"),
                ),
            ),
            Panel(
                "Length of generated and trained responses (tokens)",
                "Medians. Trained ones that stay shorter say that long responses are lost.",
                "short",
                (
                    _quantile(0.5, "rollout_response_tokens", "generated"),
                    _quantile(0.5, "buffer_trained_response_tokens", "trained"),
                    _quantile(0.95, "rollout_response_tokens", "generated, 95 %"),
                    _quantile(0.95, "buffer_trained_response_tokens", "trained, 95 %"),
                ),
            ),
            Panel(
                "Interruptions and resumptions a second",
                "Samples that a sync or a full batch stopped, and that went on.",
                "short",
                (
                    Query(_or_zero(_rate("rollout_interruptions_total")), "{{run}} interrupted"),
                    Query(_or_zero(_rate("rollout_resumptions_total")), "{{run}} resumed"),
                ),
            ),
            Panel(
                "Failed rewards and steps a second",
                "By kind. The group of such a sample is dropped.",
                "short",
                (Query(_or_zero(_rate("reward_failures_total", "kind")), "{{run}} {{kind}}"),),
            ),
            Panel(
                "Samples evicted and tokens masked a second",
                "Too old for the loss: whole groups, and tokens of groups that were trained.",
                "short",
                (
                    Query(_or_zero(_rate("buffer_evicted_samples_total")), "{{run}} samples"),
                    Query(_or_zero(_rate("buffer_masked_tokens_total")), "{{run}} tokens"),
                ),
            ),
            Panel(
                "Evaluated responses a second",
                "By outcome; failed ones are in no mean.",
                "short",
                (
                    Query(
                        _or_zero(_rate("evaluation_samples_total", "outcome")),
                        "{{run}} {{outcome}}",
                    ),
                ),
            ),
        ),
    ),
    Row(
        "Engines",
        (
            Panel(
                "Generated tokens a second, by engine",
                "vLLM's own count, evaluations and requests from outside included.",
                "short",
                (Query(_rate_of_engines("generation_tokens_total"), "{{ReplicaId}}"),),
            ),
            Panel(
                "Requests in an engine",
                "As the run has sent them, those that wait inside of the engine included.",
                "short",
                (
                    Query(
                        f"max by (run, replica) (ray_apr_server_running_requests{{{_RUN}}})",
                        "{{run}} {{replica}}",
                    ),
                ),
            ),
            Panel(
                "Running and waiting requests, by engine",
                "vLLM's own: requests of a step, and those that wait for a place or KV entries.",
                "short",
                (
                    _of_engines("num_requests_running", "{{ReplicaId}} running"),
                    _of_engines("num_requests_waiting", "{{ReplicaId}} waiting"),
                ),
            ),
            Panel(
                "KV cache in use",
                "Near 1 the engine preempts requests and computes their entries again.",
                "percentunit",
                (_of_engines("kv_cache_usage_perc"),),
                top=1.0,
            ),
            Panel(
                "Preemptions a second",
                "Requests that lost their KV entries to others.",
                "short",
                (
                    Query(
                        f"({_rate_of_engines('num_preemptions_total')}) or "
                        f"(0 * max by (ReplicaId) (ray_vllm_num_requests_running{{{_REPLICA}}}))",
                        "{{ReplicaId}}",
                    ),
                ),
            ),
            Panel(
                "Time between two tokens",
                "Mean, of at most eight requests of each step.",
                "s",
                (
                    Query(
                        f"{_rate_of_engines('inter_token_latency_seconds_sum')} / "
                        f"({_rate_of_engines('inter_token_latency_seconds_count')} > 0)",
                        "{{ReplicaId}}",
                    ),
                ),
            ),
        ),
    ),
    Row(
        "Trainer",
        (
            Panel(
                "What the trainer does",
                "Share of rank 0's time by activity, each counted when it ends.",
                "percentunit",
                (
                    Query(
                        f"{_rate('trainer_activity_seconds_total', 'activity')} / "
                        f"on (run) group_left () {_rate('trainer_activity_seconds_total')}",
                        "{{run}} {{activity}}",
                    ),
                ),
                top=1.0,
            ),
            Panel(
                "Time of a step",
                "Forward, backward and optimizer of one batch, and the wait for it.",
                "s",
                (
                    _mean("trainer_step_seconds", "step"),
                    _mean("trainer_wait_seconds", "wait for the batch"),
                    _mean("trainer_sync_wait_seconds", "wait for syncs"),
                ),
            ),
            Panel(
                "Steps a minute",
                "Batches trained.",
                "short",
                (Query(f"60 * {_rate('trainer_step_seconds_count')}", "{{run}}"),),
            ),
        ),
    ),
    Row(
        "Weight syncs",
        (
            Panel(
                "Parts of a sync",
                "The whole, its gather on the train workers, and how long generation stood still.",
                "s",
                (
                    _mean("weight_sync_seconds", "whole"),
                    _mean("weight_gather_seconds", "gather"),
                    _mean("weight_generation_stopped_seconds", "generation stopped"),
                ),
            ),
            Panel(
                "Syncs a minute",
                "One for each sync_every steps.",
                "short",
                (Query(f"60 * {_rate('weight_sync_seconds_count')}", "{{run}}"),),
            ),
        ),
    ),
)
