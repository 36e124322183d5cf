"""Settings of scheduling: when samples are started, interrupted, resumed and dropped."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from ray_apr.config.evaluation import EvaluationConfig
from ray_apr.core.checks import (
    answers_at_once,
    at_least,
    from_mapping,
    of_type,
    one_of,
    require,
    takes_one,
    whole,
    whole_or_none,
)
from ray_apr.core.exceptions import ConfigError

Mode = Literal["sync", "one_step_off", "stream", "async", "in_flight", "apr"]
Interrupt = Literal["never", "batch_full", "weight_sync"]
AfterInterrupt = Literal["resume", "restart", "discard"]
KVCache = Literal["recompute", "keep"]
ResumeOrder = Literal["oldest_version", "fifo", "most_tokens"]
OnStale = Literal["evict", "mask", "wait"]
Admission = Literal["stream", "batch"]

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
    """Oldest token that is trained, in versions before the one that trains it. The version rises by
    one with each trained batch, whatever its ``train.mini_batches`` and ``train.epochs``."""
    oversampling_factor: float = 2.0
    """Samples kept under generation, in batches: supplementation (1 = none)."""
    admission: Admission | Callable[..., Any] = "stream"
    """stream: a new group starts whenever there is room; batch: new groups start a batch at a
    time, once nothing generates any more. Or a rule of the user's, a function or a class whose
    instances are called: `scheduling.admission.Admission`."""
    interrupt: Interrupt = "weight_sync"
    """never: a weight sync leaves requests in flight, which takes vLLM 0.32 or `drain`;
    weight_sync: each sync interrupts them; batch_full: as soon as the next batch is complete, the
    rest is interrupted and waits for the next version."""
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
    resume_order: ResumeOrder | Callable[..., Any] = "oldest_version"
    """Which interrupted sample is resumed first: the one with the oldest token, the one that was
    interrupted first, or the one with the most tokens. Or a rank of the user's, a function or a
    class whose instances are called: `scheduling.resume_order.ResumeOrder`."""
    tail_round: int | None = None
    """Tail batching: samples that were interrupted twice or more are held back until this many are
    there, and are then resumed together; one at the edge of the staleness bound releases them
    all. None resumes each at once."""
    on_stale: OnStale = "mask"
    """What becomes of a group whose oldest token is beyond ``max_staleness``: evict drops it whole,
    mask trains the tokens that are within the bound and leaves the others out of the loss, wait
    lets the trainer wait for groups that are about to get there."""
    sync_every: int = 1
    """Versions, that is trained batches, for each weight sync."""
    batches_per_step: int = 1
    """Batches of ``train.batch_size`` samples that one step trains together."""
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
    """Drop groups whose rewards are all equal, which GRPO learns nothing from (DAPO, 2503.14476,
    eq. 11); another prompt takes the place at once. Rewards are as the reward gave them: without
    the overlong punishment and KL that the loss takes off them."""
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
        """What a weight sync does with requests that are still in flight.

        Where each batch waits for the weights of the last one, these are evaluations alone. They
        are interrupted and go on by new calls, whose versions every vLLM tells.
        """
        if self.drain:
            return "wait"
        awaits_weights = self.max_staleness == 0 and self.admission == "batch"
        return "keep" if self.interrupt == "never" and not awaits_weights else "abort"

    @property
    def is_adaptive(self) -> bool:
        """Whether the engines say how many samples may be in flight."""
        return self.max_inflight == "adaptive"

    @property
    def restarts(self) -> bool:
        """Whether interruption leaves no tokens, so that what runs cannot become stale."""
        return self.interrupt == "batch_full" and self.after_interrupt != "resume"

    def step_size(self, batch_size: int) -> int:
        """Samples of one step."""
        return batch_size * self.batches_per_step

    def max_inflight_samples(self, step_size: int) -> int:
        """`max_inflight` if it is a number; None: what supplementation asks for, ceil(f * B);
        adaptive: where it begins, half way between the samples of one step and that."""
        if isinstance(self.max_inflight, int):
            return self.max_inflight
        factor = self.oversampling_factor
        return math.ceil(step_size * ((1 + factor) / 2 if self.is_adaptive else factor))

    def max_buffered_samples(self, step_size: int) -> int:
        """Samples that have ended and are not trained beyond which no group starts."""
        return math.floor(self.live_batches * step_size)

    def most_requests(self, step_size: int, evaluation: EvaluationConfig | None) -> int:
        """Samples and evaluations that can be alive at once, in an engine or on the way to one."""
        batches = max(self.live_batches, self.oversampling_factor)
        return math.ceil(batches * step_size) + (evaluation.max_inflight if evaluation else 0)

    def __post_init__(self) -> None:
        s = "partial_rollout"
        one_of(s, self, {"mode": Mode, "interrupt": Interrupt, "after_interrupt": AfterInterrupt})
        one_of(s, self, {"kv_cache": KVCache, "on_stale": OnStale})
        self._check_rule("admission", Admission)
        self._check_rule("resume_order", ResumeOrder)
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

    @property
    def live_batches(self) -> float:
        """The tighter of the limits on what was begun and is not trained (`scheduling.limits`)."""
        by_age = self.max_staleness + 1
        if self.max_live_batches is None:
            return by_age
        return min(by_age, self.max_live_batches + self.sync_every - 1)

    def _check_rule(self, name: str, builtin: Any) -> None:
        """Check a built-in name or a rule of the user's; of a class an object is made."""
        field, rule = f"partial_rollout.{name}", getattr(self, name)
        if isinstance(rule, type):
            try:
                rule = rule()
            except Exception as error:
                remedy = f"making one raised {type(error).__name__}: {error}"
                raise ConfigError(field, rule, remedy) from error
            object.__setattr__(self, name, rule)
        if isinstance(rule, str) or not callable(rule):
            known = get_args(builtin)
            remedy = f"must be one of {', '.join(known)}, or a function or class of one argument"
            require(rule in known, field, rule, remedy)
            return
        takes_one(field, rule, "must take one argument")
        answers_at_once(field, rule)
