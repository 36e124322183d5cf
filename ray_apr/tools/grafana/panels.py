"""The panels of the dashboard, in the order in which an operator asks."""

from __future__ import annotations

from dataclasses import dataclass

from ray_apr.tools.grafana.queries import (
    REPLICA,
    RUN,
    Query,
    gauge,
    mean,
    of_engines,
    or_zero,
    quantile,
    rate,
    rate_of_engines,
    share,
)


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


ROWS: tuple[Row, ...] = (
    Row(
        "Is it learning?",
        (
            Panel(
                "Reward",
                "Mean reward of the batch that was trained last.",
                "short",
                (gauge("trainer_reward_mean", ""),),
            ),
            Panel(
                "Evaluation",
                "Mean reward of the held-out prompts at the version that was evaluated last.",
                "short",
                (gauge("evaluation_reward_mean", ""),),
            ),
            Panel(
                "Policy version",
                "Batches trained, and the version that was evaluated last.",
                "none",
                (
                    gauge("trainer_policy_version", "trained"),
                    gauge("evaluation_policy_version", "evaluated"),
                ),
            ),
            Panel(
                "Loss",
                "Loss of the batch that was trained last.",
                "short",
                (gauge("trainer_loss", ""),),
            ),
            Panel(
                "Gradient norm",
                "Before clipping, of the batch that was trained last.",
                "short",
                (gauge("trainer_grad_norm", ""),),
            ),
            Panel(
                "Entropy (nats)",
                "Mean over the tokens of the batch. Towards 0 the policy no longer explores.",
                "short",
                (gauge("trainer_entropy_nats", ""),),
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
                    gauge("trainer_staleness_mean_steps", "mean"),
                    gauge("trainer_staleness_max_steps", "max"),
                ),
            ),
            Panel(
                "Staleness of trained samples (steps)",
                "Quantiles over the samples, by the oldest token in the loss.",
                "none",
                (
                    quantile(0.5, "buffer_trained_staleness_steps", "median"),
                    quantile(0.95, "buffer_trained_staleness_steps", "95 %"),
                ),
            ),
            Panel(
                "KL of trainer and engines (nats)",
                "k3 estimate per token: what staleness and numerics make of the log-probs.",
                "short",
                (gauge("trainer_kl_nats", ""),),
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
                    Query(or_zero(share("server_activity_seconds_total", "idle")), "{{run}} idle"),
                    Query(
                        or_zero(share("server_activity_seconds_total", "paused")),
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
                    Query(share("trainer_activity_seconds_total", "wait"), "{{run}} batch"),
                    Query(or_zero(share("trainer_activity_seconds_total", "sync")), "{{run}} sync"),
                ),
                top=1.0,
            ),
            Panel(
                "The batch that is waited for",
                "How long the trainer has waited for its batch by now; it fails at "
                "buffer.wait_timeout_s if nothing moves.",
                "s",
                (gauge("buffer_batch_wait_seconds", ""),),
            ),
            Panel(
                "Samples in the engines",
                "At the limit, partial_rollout.max_inflight holds generation back.",
                "short",
                (
                    gauge("rollout_inflight_samples", "in flight"),
                    gauge("rollout_inflight_limit_samples", "limit"),
                ),
            ),
            Panel(
                "Unfinished and held samples",
                "Held ones wait to be resumed. At the limit, oversampling_factor holds new "
                "groups back.",
                "short",
                (
                    gauge("rollout_unfinished_samples", "unfinished"),
                    gauge("rollout_held_samples", "held"),
                    gauge("rollout_unfinished_limit_samples", "limit"),
                ),
            ),
            Panel(
                "Samples in the buffer",
                "Near the limit the trainer is the slower side, near 0 the engines are.",
                "short",
                (
                    gauge("buffer_samples", "buffered"),
                    gauge("buffer_limit_samples", "limit"),
                ),
            ),
            Panel(
                "Time of a reward",
                "From the end of a response to its reward, the queue included.",
                "s",
                (
                    mean("reward_duration_seconds", "mean"),
                    quantile(0.95, "reward_duration_seconds", "95 %"),
                ),
            ),
            Panel(
                "Time of an environment step",
                "From the end of a turn to the answer; 0 without an environment.",
                "s",
                (Query(or_zero(mean("environment_duration_seconds", "").expr), "{{run}} mean"),),
            ),
        ),
    ),
    Row(
        "What is lost?",
        (
            Panel(
                "Discarded tokens a second",
                "By reason: stale, masked, restarted, surplus, filtered, failed, poison, lost, "
                "shutdown.",
                "short",
                (
                    Query(
                        or_zero(rate("rollout_discarded_tokens_total", "reason")),
                        "{{run}} {{reason}}",
                    ),
                ),
            ),
            Panel(
                "Generated and trained tokens a second",
                "What lies between them is buffered, held or discarded.",
                "short",
                (
                    Query(rate("rollout_generated_tokens_total"), "{{run}} generated"),
                    Query(rate("buffer_trained_tokens_total"), "{{run}} trained"),
                ),
            ),
            Panel(
                "Length of generated and trained responses (tokens)",
                "Medians. Trained ones that stay shorter say that long responses are lost.",
                "short",
                (
                    quantile(0.5, "rollout_response_tokens", "generated"),
                    quantile(0.5, "buffer_trained_response_tokens", "trained"),
                    quantile(0.95, "rollout_response_tokens", "generated, 95 %"),
                    quantile(0.95, "buffer_trained_response_tokens", "trained, 95 %"),
                ),
            ),
            Panel(
                "Interruptions and resumptions a second",
                "Samples that a sync or a full batch stopped, and that went on.",
                "short",
                (
                    Query(or_zero(rate("rollout_interruptions_total")), "{{run}} interrupted"),
                    Query(or_zero(rate("rollout_resumptions_total")), "{{run}} resumed"),
                ),
            ),
            Panel(
                "Failed rewards and steps a second",
                "By kind. The group of such a sample is dropped.",
                "short",
                (Query(or_zero(rate("reward_failures_total", "kind")), "{{run}} {{kind}}"),),
            ),
            Panel(
                "Samples evicted and tokens masked a second",
                "Too old for the loss: whole groups, and tokens of groups that were trained.",
                "short",
                (
                    Query(or_zero(rate("buffer_evicted_samples_total")), "{{run}} samples"),
                    Query(or_zero(rate("buffer_masked_tokens_total")), "{{run}} tokens"),
                ),
            ),
            Panel(
                "Evaluated responses a second",
                "By outcome; failed ones are in no mean.",
                "short",
                (
                    Query(
                        or_zero(rate("evaluation_samples_total", "outcome")),
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
                (Query(rate_of_engines("generation_tokens_total"), "{{ReplicaId}}"),),
            ),
            Panel(
                "Requests in an engine",
                "As the run has sent them, those that wait inside of the engine included.",
                "short",
                (
                    Query(
                        f"max by (run, replica) (ray_apr_server_running_requests{{{RUN}}})",
                        "{{run}} {{replica}}",
                    ),
                ),
            ),
            Panel(
                "Running and waiting requests, by engine",
                "vLLM's own: requests of a step, and those that wait for a place or KV entries.",
                "short",
                (
                    of_engines("num_requests_running", "{{ReplicaId}} running"),
                    of_engines("num_requests_waiting", "{{ReplicaId}} waiting"),
                ),
            ),
            Panel(
                "KV cache in use",
                "Near 1 the engine preempts requests and computes their entries again.",
                "percentunit",
                (of_engines("kv_cache_usage_perc"),),
                top=1.0,
            ),
            Panel(
                "Preemptions a second",
                "Requests that lost their KV entries to others.",
                "short",
                (
                    Query(
                        f"({rate_of_engines('num_preemptions_total')}) or "
                        f"(0 * max by (ReplicaId) (ray_vllm_num_requests_running{{{REPLICA}}}))",
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
                        f"{rate_of_engines('inter_token_latency_seconds_sum')} / "
                        f"({rate_of_engines('inter_token_latency_seconds_count')} > 0)",
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
                        f"{rate('trainer_activity_seconds_total', 'activity')} / "
                        f"on (run) group_left () {rate('trainer_activity_seconds_total')}",
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
                    mean("trainer_step_seconds", "step"),
                    mean("trainer_wait_seconds", "wait for the batch"),
                    mean("trainer_sync_wait_seconds", "wait for syncs"),
                ),
            ),
            Panel(
                "Steps a minute",
                "Batches trained.",
                "short",
                (Query(f"60 * {rate('trainer_step_seconds_count')}", "{{run}}"),),
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
                    mean("weight_sync_seconds", "whole"),
                    mean("weight_gather_seconds", "gather"),
                    mean("weight_generation_stopped_seconds", "generation stopped"),
                ),
            ),
            Panel(
                "Syncs a minute",
                "One for each sync_every steps.",
                "short",
                (Query(f"60 * {rate('weight_sync_seconds_count')}", "{{run}}"),),
            ),
        ),
    ),
)
