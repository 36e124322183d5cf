"""Settings: frozen keyword-only dataclasses that check themselves at construction.

Each check names the field, the value and the remedy (`ConfigError`). This module loads neither
ray nor torch, so that a bad setting is found before anything starts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ray_apr.checks import (
    at_least,
    from_mapping,
    is_number,
    of_type,
    one_of,
    positive,
    require,
    whole,
    whole_or_none,
)
from ray_apr.types import SamplingParams

Mode = Literal["sync", "one_step_off", "stream", "async", "in_flight", "apr"]
Interrupt = Literal["never", "batch_full", "weight_sync"]
AfterInterrupt = Literal["resume", "restart", "discard"]
KVCache = Literal["recompute", "keep"]
ResumeOrder = Literal["oldest_version", "fifo", "most_tokens"]
OnStale = Literal["evict", "mask", "wait"]
Admission = Literal["stream", "batch"]
Device = Literal["auto", "cpu", "cuda"]
DType = Literal["float32", "bfloat16"]
Estimator = Literal["grpo", "dr_grpo"]
Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"]
Schedule = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """Rollout servers, sampling and rewards."""

    num_replicas: int = 1
    """Rollout servers, each one vLLM engine."""
    group_size: int = 8
    """Samples of one prompt."""
    max_response_tokens: int = 1024
    """Budget of one response over all of its interruptions, in tokens."""
    max_model_len: int | None = None
    """Longest prompt + response of the engine, in tokens; None takes the model's own limit."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 means the whole vocabulary."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end a response beside the model's end-of-sequence id."""
    seed: int | None = None
    """With a seed, each request's seed is derived from it; None leaves it to the engine."""
    device: Device = "auto"
    """Where the engines run; auto takes CUDA when the cluster has GPUs."""
    dtype: DType = "float32"
    """Data type of the engine's weights."""
    tensor_parallel_size: int = 1
    """GPUs of one engine."""
    num_cpus_per_replica: float = 1.0
    """Ray CPUs that a replica reserves."""
    engine_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of vLLM's engine, e.g. ``{"max_num_seqs": 64}``."""
    prompt_column: str = "prompt"
    """Column of the dataset: text, chat messages, or token ids."""
    replay_column: str | None = None
    """Column with a list of response lengths, in tokens, of which sample i takes number i: each
    response gets exactly so long, whatever the model says. It replays a trace; None lets the model
    decide."""
    http_host: str = "127.0.0.1"
    http_port: int | None = None
    """Port of the HTTP ingress; None opens none."""
    control_token: str | None = field(default=None, repr=False)
    """Bearer token that abort, pause and resume demand over HTTP; None demands none."""
    start_timeout_s: float = 600.0
    """Limit for all servers to become ready."""
    request_timeout_s: float = 600.0
    """Limit for one generate call, pauses included."""
    max_request_failures: int = 3
    """Failures of one sample before its group is dropped as failed."""
    max_consecutive_failures: int = 32
    """Failures in a row, of generation or of rewards, that stop the run."""
    max_turns: int | None = None
    """Most turns of a response in a run with an environment; None leaves it to the budget."""
    reward_timeout_s: float = 60.0
    """Limit for one call of the reward function, or of the environment."""
    reward_retries: int = 1
    """Further tries after such a call raised or timed out."""
    reward_concurrency: int = 16
    """Such calls at the same time."""
    num_cpus_per_reward: float = 0.0
    """Ray CPUs of one reward worker; 0 shares what is there."""
    num_reward_workers: int = 1
    """Processes that run the reward function and the environment."""

    def __post_init__(self) -> None:
        s = "rollout"
        sizes = ("num_replicas", "group_size", "max_response_tokens", "tensor_parallel_size")
        limits = ("max_request_failures", "max_consecutive_failures", "reward_concurrency")
        whole(s, self, *sizes, *limits, "top_k", "reward_retries", "num_reward_workers")
        at_least(s, self, 1, *sizes, *limits, "num_reward_workers")
        at_least(s, self, 0, "num_cpus_per_replica", "num_cpus_per_reward", "top_k")
        at_least(s, self, 0, "reward_retries")
        positive(s, self, "temperature", "top_p", "start_timeout_s")
        positive(s, self, "request_timeout_s", "reward_timeout_s")
        require(self.top_p <= 1, f"{s}.top_p", self.top_p, "must be in (0, 1]")
        one_of(s, self, {"device": Device, "dtype": DType})
        of_type(s, self, Mapping, "a mapping", "engine_kwargs")
        of_type(s, self, str, "a text", "prompt_column", "http_host")
        of_type(s, self, str | None, "a text or None", "control_token", "replay_column")
        of_type(s, self, list | tuple, "a list of token ids", "stop_token_ids")
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        require(
            all(isinstance(i, int) and is_number(i) and i >= 0 for i in self.stop_token_ids),
            f"{s}.stop_token_ids",
            self.stop_token_ids,
            "must be a list of whole numbers of at least 0",
        )
        whole_or_none(s, self, 1, "max_model_len", "http_port", "max_turns")
        whole_or_none(s, self, 0, "seed")
        if self.max_model_len is not None:
            require(
                self.max_model_len > self.max_response_tokens,
                f"{s}.max_model_len",
                self.max_model_len,
                f"must exceed max_response_tokens = {self.max_response_tokens}, to hold the prompt",
            )
        port = self.http_port
        require(port is None or port < 65536, f"{s}.http_port", port, "must be in 1..65535 or None")

    @property
    def sampling(self) -> SamplingParams:
        """Sampling settings of a request; the seed is set per sample."""
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.replay_column is not None,
        )


_PRESETS: Mapping[str, Mapping[str, Any]] = {
    "sync": {
        "max_staleness": 0,
        "oversampling_factor": 1.0,
        "interrupt": "never",
        "on_stale": "evict",
        "admission": "batch",
        "overlap_rewards": False,
        "overlap_sync": False,
        "max_inflight": None,
        "max_live_batches": None,
    },
    "one_step_off": {
        "max_staleness": 1,
        "oversampling_factor": 1.0,
        "interrupt": "never",
        "drain": True,
        "on_stale": "evict",
        "admission": "batch",
        "overlap_sync": False,
        "max_inflight": None,
        "max_live_batches": None,
    },
    "stream": {
        "max_staleness": 0,
        "interrupt": "batch_full",
        "after_interrupt": "restart",
        "on_stale": "evict",
        "max_live_batches": None,
    },
    "async": {"interrupt": "never", "drain": True, "on_stale": "evict"},
    "in_flight": {"interrupt": "never"},
    "apr": {},
}


@dataclass(frozen=True, kw_only=True)
class PartialRolloutConfig:
    """When samples are started, interrupted, resumed and dropped.

    The settings are orthogonal; a mode is a name for a set of them (`preset`). The defaults are
    those of ``"apr"``.
    """

    mode: Mode = "apr"
    """Name of the preset that these settings come from; shown in reports."""
    max_staleness: int = 4
    """Oldest token that is trained, in optimizer steps before the version that trains it."""
    oversampling_factor: float = 2.0
    """Samples kept under generation, in batches: supplementation (1 = none)."""
    admission: Admission = "stream"
    """stream: a new group starts whenever there is room; batch: new groups start a batch at a
    time, once nothing generates any more."""
    interrupt: Interrupt = "weight_sync"
    """never: a weight sync leaves requests in flight; weight_sync: each sync interrupts them;
    batch_full: as soon as the next batch is complete, the rest is interrupted and waits for the
    next version."""
    after_interrupt: AfterInterrupt = "resume"
    """What becomes of an interrupted sample: resume goes on from its tokens, restart drops them and
    generates it anew, discard drops its whole group."""
    drain: bool = False
    """Let requests in flight end before each weight sync, so that each response has one version;
    only with ``interrupt="never"``, which otherwise freezes them in the engine."""
    kv_cache: KVCache = "keep"
    """What becomes of KV entries of earlier weights at a sync: keep goes on with them (behavior
    log-probs are those of the mixture, so that the correction stays exact), recompute drops them
    and prefills again."""
    resume_order: ResumeOrder = "oldest_version"
    """Which interrupted sample is resumed first: the one with the oldest token, the one that was
    interrupted first, or the one with the most tokens."""
    tail_round: int | None = None
    """Tail batching: samples that were interrupted twice or more are held back until this many are
    there, and are then resumed together; one at the edge of the staleness bound releases them
    all. None resumes each at once."""
    on_stale: OnStale = "mask"
    """What becomes of a group whose oldest token is beyond ``max_staleness``: evict drops it whole,
    mask trains the tokens that are within the bound and leaves the others out of the loss, wait
    lets the trainer wait for groups that are about to get there."""
    sync_every: int = 1
    """Optimizer steps for each weight sync."""
    batches_per_step: int = 1
    """Batches of ``train.batch_size`` samples that one optimizer step trains together."""
    overlap_sync: bool = True
    """The trainer begins its next step while the weights of the last one travel; False waits until
    the engines run again."""
    max_inflight: int | Literal["adaptive"] | None = "adaptive"
    """Most samples in the engines at once: a number; adaptive finds it for each replica from the
    engine's queue, KV use and preemptions; None takes what supplementation asks for."""
    max_live_batches: float | None = 4.0
    """No new group starts while this many batches are alive: generating, waiting for a reward, in
    the buffer or in training. What is alive has to be trained before what starts now, so that less
    of it means fresher data, and too little of it a trainer that waits; ``max_staleness + 1`` is
    the most there can be, and what None takes."""
    overlap_rewards: bool = True
    """Score each sample as soon as it ends; False scores once nothing generates any more."""
    filter_zero_variance: bool = False
    """Drop groups whose rewards are all equal, which GRPO learns nothing from (DAPO, 2503.14476);
    another prompt takes the place at once."""
    max_filter_retries: int = 0
    """Further tries of a prompt whose group was filtered."""

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> PartialRolloutConfig:
        """Settings of a named mode, with single settings replaced.

        Args:
            name: ``"sync"`` (generate a batch, wait for its last sample, score, train),
                ``"one_step_off"`` (batch k + 1 is generated while k trains), ``"stream"`` (fill the
                batch with what ends first, abort and restart the rest), ``"async"`` (stream within
                the staleness bound, never interrupt), ``"in_flight"`` (requests go on across the
                weight sync) or ``"apr"`` (supplementation, interruption, resume).
            overrides: Fields of this class.

        Raises:
            ConfigError: For an unknown name, or settings that contradict it.

        Example:
            >>> PartialRolloutConfig.preset("apr", max_staleness=2).max_staleness
            2
        """
        known = ", ".join(_PRESETS)
        require(name in tuple(_PRESETS), "mode", name, f"must be one of {known}")
        values = {"mode": name, **_PRESETS[name], **overrides}
        config: PartialRolloutConfig = from_mapping(cls, "partial_rollout", values)
        return config

    @property
    def pause_mode(self) -> Literal["abort", "keep", "wait"]:
        """What a weight sync does with requests that are still in flight."""
        if self.drain:
            return "wait"
        return "keep" if self.interrupt == "never" else "abort"

    @property
    def is_adaptive(self) -> bool:
        """Whether the engines say how many samples may be in flight."""
        return self.max_inflight == "adaptive"

    @property
    def restarts(self) -> bool:
        """Whether interruption leaves no tokens, so that what runs cannot become stale."""
        return self.interrupt == "batch_full" and self.after_interrupt != "resume"

    def step_size(self, batch_size: int) -> int:
        """Samples of one optimizer step."""
        return batch_size * self.batches_per_step

    def max_inflight_samples(self, step_size: int) -> int:
        """`max_inflight` if it is a number; None: what supplementation asks for, ceil(f * B);
        adaptive: where it begins, half way between the samples of one step and that."""
        if isinstance(self.max_inflight, int):
            return self.max_inflight
        factor = self.oversampling_factor
        return math.ceil(step_size * ((1 + factor) / 2 if self.is_adaptive else factor))

    def __post_init__(self) -> None:
        s = "partial_rollout"
        one_of(s, self, {"mode": Mode, "interrupt": Interrupt, "after_interrupt": AfterInterrupt})
        one_of(s, self, {"kv_cache": KVCache, "resume_order": ResumeOrder, "on_stale": OnStale})
        one_of(s, self, {"admission": Admission})
        of_type(
            s,
            self,
            bool,
            "true or false",
            "drain",
            "overlap_rewards",
            "overlap_sync",
            "filter_zero_variance",
        )
        whole(s, self, "max_staleness", "sync_every", "batches_per_step", "max_filter_retries")
        at_least(s, self, 0, "max_staleness", "max_filter_retries")
        at_least(s, self, 1, "oversampling_factor", "sync_every", "batches_per_step")
        if self.max_live_batches is not None:
            at_least(s, self, 1, "max_live_batches")
        if not self.is_adaptive:
            whole_or_none(s, self, 1, "max_inflight")
        whole_or_none(s, self, 1, "tail_round")
        require(
            self.restarts or self.oversampling_factor <= self.max_staleness + 1,
            f"{s}.oversampling_factor",
            self.oversampling_factor,
            f"must be at most max_staleness + 1 = {self.max_staleness + 1}: samples started beyond "
            "that could only be trained when they are too old; raise max_staleness or lower it",
        )
        require(
            self.sync_every <= self.max_staleness + 1,
            f"{s}.sync_every",
            self.sync_every,
            f"must be at most max_staleness + 1 = {self.max_staleness + 1}: the last step before a "
            "sync would find only samples beyond the bound",
        )
        require(
            not self.drain or self.interrupt == "never",
            f"{s}.drain",
            self.drain,
            'needs interrupt="never": a sync cannot both interrupt requests and let them end',
        )
        require(
            self.mode != "sync" or self.max_staleness == 0,
            f"{s}.max_staleness",
            self.max_staleness,
            'must be 0 with mode "sync"; leave it out, or use mode "apr"',
        )


@dataclass(frozen=True, kw_only=True)
class BufferConfig:
    """The sample buffer and the stream to the trainer."""

    wait_timeout_s: float = 300.0
    """Longest time that the trainer waits for one batch before the run fails with a diagnosis."""
    poll_timeout_s: float = 20.0
    """Longest single call that waits inside the buffer; callers then call again."""

    def __post_init__(self) -> None:
        positive("buffer", self, "wait_timeout_s", "poll_timeout_s")


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """Advantage estimator, loss and off-policy correction."""

    advantage: Estimator = "grpo"
    """grpo: (R - mean) / (std + 1e-6) in a group; dr_grpo: without the division."""
    aggregation: Aggregation = "token-mean"
    """How token losses become one number; denominators count the whole batch over all ranks."""
    clip_low: float = 0.2
    """The ratio of policies is clipped below at 1 - clip_low."""
    clip_high: float = 0.28
    """... and above at 1 + clip_high (DAPO's clip-higher)."""
    dual_clip: float | None = None
    """Bound c > 1 of the loss for negative advantages; None leaves it out."""
    importance_cap: float | None = 2.0
    """Cap C of the truncated importance weight min(proximal / behavior, C) per token; None trains
    without the correction for stale data."""

    def __post_init__(self) -> None:
        s = "algorithm"
        one_of(s, self, {"advantage": Estimator, "aggregation": Aggregation})
        positive(s, self, "clip_low", "clip_high")
        require(self.clip_low < 1, f"{s}.clip_low", self.clip_low, "must be in (0, 1)")
        if self.dual_clip is not None:
            positive(s, self, "dual_clip")
            require(self.dual_clip > 1, f"{s}.dual_clip", self.dual_clip, "must exceed 1")
        if self.importance_cap is not None:
            positive(s, self, "importance_cap")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The optimizer's side: batch, learning rate, memory, checkpoints, weight sync."""

    steps: int = 100
    """Optimizer steps of the run."""
    batch_size: int = 128
    """Samples of one optimizer step over all train workers; a multiple of the group size."""
    learning_rate: float = 1e-6
    lr_schedule: Schedule = "constant"
    warmup_steps: int = 0
    """Steps of linear warm-up."""
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this global norm."""
    micro_batch_tokens: int = 16384
    """Prompt + response tokens of one forward pass on one worker, padding included."""
    activation_checkpointing: bool = False
    param_dtype: DType = "float32"
    """Data type of the forward and backward pass; master weights are float32."""
    reduce_dtype: DType = "float32"
    """Data type of the gradients' reduction."""
    checkpoint_every: int = 0
    """Steps between checkpoints; 0 writes one at the end only."""
    num_checkpoints_to_keep: int = 2
    weight_bucket_mb: float = 64.0
    """Size of one broadcast of the weight sync, in MiB."""
    weight_sync_timeout_s: float = 120.0
    """Limit for one weight sync; engines resume by themselves after it."""
    num_threads: int | None = None
    """CPU threads of one train worker; None divides the cores among engines and workers."""
    seed: int = 0
    """Seed of the prompt order, of the requests' seeds and of the trainer."""

    def __post_init__(self) -> None:
        s = "train"
        counts = ("steps", "batch_size", "micro_batch_tokens", "num_checkpoints_to_keep")
        whole(s, self, *counts, "warmup_steps", "checkpoint_every", "seed")
        at_least(s, self, 1, *counts)
        at_least(s, self, 0, "warmup_steps", "checkpoint_every", "weight_decay", "seed")
        positive(s, self, "learning_rate", "eps", "max_grad_norm")
        positive(s, self, "weight_bucket_mb", "weight_sync_timeout_s")
        one_of(s, self, {"lr_schedule": Schedule, "param_dtype": DType, "reduce_dtype": DType})
        of_type(s, self, bool, "true or false", "activation_checkpointing")
        of_type(s, self, list | tuple, "two numbers in [0, 1)", "betas")
        object.__setattr__(self, "betas", tuple(self.betas))
        require(
            len(self.betas) == 2 and all(is_number(b) and 0 <= b < 1 for b in self.betas),
            f"{s}.betas",
            self.betas,
            "must be two numbers in [0, 1)",
        )
        whole_or_none(s, self, 1, "num_threads")


def check_together(
    rollout: RolloutConfig,
    train: TrainConfig,
    algorithm: AlgorithmConfig,
) -> None:
    """Check what no section can check alone.

    Raises:
        ConfigError: If the batch is no multiple of the group, or a group of one meets an estimator
            that compares the samples of a group.
    """
    require(
        train.batch_size % rollout.group_size == 0,
        "train.batch_size",
        train.batch_size,
        f"must be a multiple of rollout.group_size = {rollout.group_size}: groups train whole",
    )
    require(
        rollout.group_size > 1,
        "rollout.group_size",
        rollout.group_size,
        f'must be at least 2 with algorithm.advantage = "{algorithm.advantage}", which compares '
        "the samples of one prompt",
    )
