"""Settings: frozen keyword-only dataclasses that check themselves at construction.

Each check names the field, the value and the remedy (`ConfigError`). This module loads neither
ray nor torch, so that a bad setting is found before anything starts.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from ray_apr.exceptions import ConfigError
from ray_apr.types import SamplingParams

Mode = Literal["sync", "apr"]
Interrupt = Literal["never", "batch_full", "weight_sync"]
KVCache = Literal["recompute", "keep"]
Device = Literal["auto", "cpu", "cuda"]
DType = Literal["float32", "bfloat16"]
Estimator = Literal["grpo", "dr_grpo"]
Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"]
Schedule = Literal["constant", "linear", "cosine"]


def _require(ok: bool, name: str, value: Any, remedy: str) -> None:
    if not ok:
        raise ConfigError(name, value, remedy)


def _is_number(value: Any) -> bool:
    """Whether it is a finite int or float; bool, text, NaN and what no float can hold are not."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _at_least(section: str, config: Any, minimum: float, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        _require(
            _is_number(value) and value >= minimum,
            f"{section}.{name}",
            value,
            f"must be a finite number of at least {minimum:g}",
        )


def _positive(section: str, config: Any, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        _require(
            _is_number(value) and value > 0,
            f"{section}.{name}",
            value,
            "must be a finite number above 0",
        )


def _whole(section: str, config: Any, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        whole = isinstance(value, int) and _is_number(value)
        _require(whole, f"{section}.{name}", value, "must be a whole number")


def _whole_or_none(section: str, config: Any, minimum: int, *names: str) -> None:
    for name in names:
        if getattr(config, name) is not None:
            _whole(section, config, name)
            _at_least(section, config, minimum, name)


def _of_type(section: str, config: Any, kind: Any, words: str, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        _require(isinstance(value, kind), f"{section}.{name}", value, f"must be {words}")


def _one_of(section: str, config: Any, choices: Mapping[str, Any]) -> None:
    for name, literal in choices.items():
        allowed: Collection[str] = get_args(literal)
        value = getattr(config, name)
        _require(
            value in allowed, f"{section}.{name}", value, f"must be one of {', '.join(allowed)}"
        )


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
    reward_timeout_s: float = 60.0
    """Limit for one call of the reward function."""
    reward_retries: int = 1
    """Further tries after a reward function raised or timed out."""
    reward_concurrency: int = 16
    """Reward calls at the same time."""
    num_cpus_per_reward: float = 0.0
    """Ray CPUs of one reward worker; 0 shares what is there."""
    num_reward_workers: int = 1
    """Processes that run the reward function."""

    def __post_init__(self) -> None:
        s = "rollout"
        whole = ("num_replicas", "group_size", "max_response_tokens", "tensor_parallel_size")
        limits = ("max_request_failures", "max_consecutive_failures", "reward_concurrency")
        _whole(s, self, *whole, *limits, "top_k", "reward_retries", "num_reward_workers")
        _at_least(s, self, 1, *whole, *limits, "num_reward_workers")
        _at_least(s, self, 0, "num_cpus_per_replica", "num_cpus_per_reward", "top_k")
        _at_least(s, self, 0, "reward_retries")
        _positive(s, self, "temperature", "top_p", "start_timeout_s")
        _positive(s, self, "request_timeout_s", "reward_timeout_s")
        _require(self.top_p <= 1, f"{s}.top_p", self.top_p, "must be in (0, 1]")
        _one_of(s, self, {"device": Device, "dtype": DType})
        _of_type(s, self, Mapping, "a mapping", "engine_kwargs")
        _of_type(s, self, str, "a text", "prompt_column", "http_host")
        _of_type(s, self, str | None, "a text or None", "control_token")
        _of_type(s, self, list | tuple, "a list of token ids", "stop_token_ids")
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        _require(
            all(isinstance(i, int) and _is_number(i) and i >= 0 for i in self.stop_token_ids),
            f"{s}.stop_token_ids",
            self.stop_token_ids,
            "must be a list of whole numbers of at least 0",
        )
        _whole_or_none(s, self, 1, "max_model_len", "http_port")
        _whole_or_none(s, self, 0, "seed")
        if self.max_model_len is not None:
            _require(
                self.max_model_len > self.max_response_tokens,
                f"{s}.max_model_len",
                self.max_model_len,
                f"must exceed max_response_tokens = {self.max_response_tokens}, to hold the prompt",
            )
        port = self.http_port
        _require(
            port is None or port < 65536, f"{s}.http_port", port, "must be in 1..65535 or None"
        )

    @property
    def sampling(self) -> SamplingParams:
        """Sampling settings of a request; the seed is set per sample."""
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop_token_ids=self.stop_token_ids,
        )


_PRESETS: Mapping[str, Mapping[str, Any]] = {
    "sync": {"max_staleness": 0, "oversampling_factor": 1.0, "interrupt": "never"},
    "apr": {},
}


@dataclass(frozen=True, kw_only=True)
class PartialRolloutConfig:
    """When samples are started, interrupted and resumed."""

    mode: Mode = "apr"
    """Name of the preset that these settings come from; shown in reports."""
    max_staleness: int = 4
    """Largest staleness that is trained, in optimizer steps."""
    oversampling_factor: float = 2.0
    """Samples kept under generation, in batches: supplementation (1 = none)."""
    interrupt: Interrupt = "weight_sync"
    """never: engines freeze and go on across a weight sync; weight_sync: each sync interrupts what
    is in flight; batch_full: as soon as the next batch is complete, the rest is interrupted and
    waits for the next version."""
    kv_cache: KVCache = "recompute"
    """What ``interrupt="never"`` does with the KV cache across a sync: recompute it under the new
    weights, or keep the old one."""
    max_inflight: int | None = None
    """Most samples in the engines at once; None takes what supplementation asks for."""
    max_ready_batches: float | None = None
    """No new group starts while the buffer holds this many batches, the one in training included.
    Where generation is faster than training, it keeps the data fresher than ``max_staleness``
    does; None leaves it to that bound."""

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> PartialRolloutConfig:
        """Settings of a named mode, with single settings replaced.

        Args:
            name: ``"sync"`` (each batch is generated by the version that it trains) or ``"apr"``
                (supplementation, interruption, resume, staleness bound).
            overrides: Fields of this class.

        Raises:
            ConfigError: For an unknown name, or settings that contradict it.

        Example:
            >>> PartialRolloutConfig.preset("apr", max_staleness=2).max_staleness
            2
        """
        known = ", ".join(_PRESETS)
        _require(name in tuple(_PRESETS), "mode", name, f"must be one of {known}")
        values = {"mode": name, **_PRESETS[name], **overrides}
        config: PartialRolloutConfig = from_mapping(cls, "partial_rollout", values)
        return config

    @property
    def pause_mode(self) -> Literal["abort", "keep"]:
        """What a weight sync does with requests in flight."""
        return "keep" if self.interrupt == "never" else "abort"

    def max_inflight_samples(self, batch_size: int) -> int:
        """`max_inflight`, or what supplementation asks for: ceil(oversampling_factor * B)."""
        return self.max_inflight or math.ceil(self.oversampling_factor * batch_size)

    def __post_init__(self) -> None:
        s = "partial_rollout"
        _one_of(s, self, {"mode": Mode, "interrupt": Interrupt, "kv_cache": KVCache})
        _whole(s, self, "max_staleness")
        _at_least(s, self, 0, "max_staleness")
        _at_least(s, self, 1, "oversampling_factor")
        if self.max_ready_batches is not None:
            _at_least(s, self, 1, "max_ready_batches")
        _whole_or_none(s, self, 1, "max_inflight")
        _require(
            self.oversampling_factor <= self.max_staleness + 1,
            f"{s}.oversampling_factor",
            self.oversampling_factor,
            f"must be at most max_staleness + 1 = {self.max_staleness + 1}: samples started beyond "
            "that could only be trained when they are too old; raise max_staleness or lower it",
        )
        _require(
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
        _positive("buffer", self, "wait_timeout_s", "poll_timeout_s")


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
        _one_of(s, self, {"advantage": Estimator, "aggregation": Aggregation})
        _positive(s, self, "clip_low", "clip_high")
        _require(self.clip_low < 1, f"{s}.clip_low", self.clip_low, "must be in (0, 1)")
        if self.dual_clip is not None:
            _positive(s, self, "dual_clip")
            _require(self.dual_clip > 1, f"{s}.dual_clip", self.dual_clip, "must exceed 1")
        if self.importance_cap is not None:
            _positive(s, self, "importance_cap")


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
        _whole(s, self, *counts, "warmup_steps", "checkpoint_every", "seed")
        _at_least(s, self, 1, *counts)
        _at_least(s, self, 0, "warmup_steps", "checkpoint_every", "weight_decay", "seed")
        _positive(s, self, "learning_rate", "eps", "max_grad_norm")
        _positive(s, self, "weight_bucket_mb", "weight_sync_timeout_s")
        _one_of(s, self, {"lr_schedule": Schedule, "param_dtype": DType, "reduce_dtype": DType})
        _of_type(s, self, bool, "true or false", "activation_checkpointing")
        _of_type(s, self, list | tuple, "two numbers in [0, 1)", "betas")
        object.__setattr__(self, "betas", tuple(self.betas))
        _require(
            len(self.betas) == 2 and all(_is_number(b) and 0 <= b < 1 for b in self.betas),
            f"{s}.betas",
            self.betas,
            "must be two numbers in [0, 1)",
        )
        _whole_or_none(s, self, 1, "num_threads")


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
    _require(
        train.batch_size % rollout.group_size == 0,
        "train.batch_size",
        train.batch_size,
        f"must be a multiple of rollout.group_size = {rollout.group_size}: groups train whole",
    )
    _require(
        rollout.group_size > 1,
        "rollout.group_size",
        rollout.group_size,
        f'must be at least 2 with algorithm.advantage = "{algorithm.advantage}", which compares '
        "the samples of one prompt",
    )


def from_mapping(cls: type, section: str, values: Mapping[str, Any]) -> Any:
    """Build a config of class `cls` from a mapping, naming unknown keys.

    Raises:
        ConfigError: For a key that is no field of `cls`, or if `values` is no mapping.
    """
    names = [f.name for f in dataclasses.fields(cls)]
    _require(isinstance(values, Mapping), section, values, "must be a mapping of settings")
    for key in values:
        _require(
            key in names, f"{section}.{key}", values[key], f"unknown; known: {', '.join(names)}"
        )
    return cls(**values)
