"""The settings of a run, section by section, and what no section can check alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol, Self

from ray_apr.compat.flash_attention import PACKAGE
from ray_apr.config.algorithm import AlgorithmConfig
from ray_apr.config.evaluation import EvaluationConfig
from ray_apr.config.partial_rollout import PartialRolloutConfig
from ray_apr.config.prompts import PromptsConfig
from ray_apr.config.ranks import RankRange
from ray_apr.config.rollout import RolloutConfig
from ray_apr.config.train import BufferConfig, TrainConfig
from ray_apr.core.checks import require
from ray_apr.core.imports import installed_version


class Scaling(Protocol):
    """Train workers, as YAML and `ray.train.ScalingConfig` say them alike."""

    @property
    def num_workers(self) -> int | tuple[int, int]:
        """Train workers of the run, or least and most of them."""

    @property
    def use_gpu(self) -> bool:
        """Whether each has a GPU."""

    @property
    def resources_per_worker(self) -> Mapping[str, float] | None:
        """What each reserves beside its GPU."""


@dataclass(frozen=True, kw_only=True)
class Sections:
    """The sections that YAML, `APRTrainer` and RLlib's config fill alike."""

    prompts: PromptsConfig = field(default_factory=PromptsConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    partial_rollout: PartialRolloutConfig = field(default_factory=PartialRolloutConfig)
    buffer: BufferConfig = field(default_factory=BufferConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    evaluation: EvaluationConfig | None = None
    """None evaluates nothing."""
    train: TrainConfig = field(default_factory=TrainConfig)

    @property
    def step_size(self) -> int:
        """Samples of one step."""
        return self.partial_rollout.step_size(self.train.batch_size)

    def with_steps(self, num_prompts: int | None = None) -> Self:
        """The same with a number of steps; see `TrainConfig.with_steps`."""
        train = self.train.with_steps(
            step_size=self.step_size,
            group_size=self.rollout.group_size,
            num_prompts=num_prompts,
        )
        return replace(self, train=train)

    def check(self, scaling: Scaling) -> None:
        """Check the sections against each other and against the train workers.

        Raises:
            ConfigError: For the first that does not fit the others.
        """
        rollout, ranks = self.rollout, RankRange.of(scaling.num_workers)
        if ranks.is_elastic:
            self._check_elastic(ranks)
        check_together(rollout, self.train, self.algorithm)
        require(
            rollout.group_size > 1 or not self.partial_rollout.filter_zero_variance,
            "partial_rollout.filter_zero_variance",
            True,
            "must be false with rollout.group_size = 1: it would drop every group",
        )
        for workers in {ranks.least, ranks.most}:
            self.train.check_workers(workers)
        check_placement(rollout, self.partial_rollout, self.train, ranks.most)
        require(
            not (scaling.use_gpu and rollout.engine.device == "cpu"),
            "scaling.use_gpu",
            True,
            'needs rollout.engine.device "cuda" or "auto": one run, one device',
        )
        require(
            scaling.use_gpu or not self.train.cpu_offload,
            "train.cpu_offload",
            True,
            "has no meaning without scaling.use_gpu, as all is in the host's memory; leave it out",
        )
        other = "gloo" if scaling.use_gpu else "nccl"
        require(
            self.train.weight_transport != other or rollout.is_colocated,
            "train.weight_transport",
            other,
            f"must not be {other} with scaling.use_gpu = {scaling.use_gpu}; leave it at auto",
        )
        check_attention(self.train, uses_gpus=scaling.use_gpu)
        resources = scaling.resources_per_worker
        require(
            not rollout.is_colocated or "GPU" not in (resources or {}),
            "scaling.resources_per_worker",
            resources,
            "leave GPU out with colocated engines: a worker has what its engine leaves of a GPU",
        )
        gpus = (resources or {}).get("GPU", 1)
        require(
            not scaling.use_gpu or gpus == 1 or (gpus < 1 and ranks.most == 1),
            "scaling.resources_per_worker",
            resources,
            "must have 1 GPU, which is all that a train worker uses, and which NCCL wants each of "
            "several to have alone; leave GPU out",
        )
        self._check_evaluation()

    def _check_evaluation(self) -> None:
        """Check that responses to held-out prompts have room, and are drawn where something says
        how.

        Raises:
            ConfigError: If they have not, or are not.
        """
        if self.evaluation is None:
            return
        suites, column = self.evaluation.suites, self.evaluation.suite_column or ""
        of_suite = {suite: self.evaluation.of_row({column: suite}) for suite in suites}
        greedy = "has no meaning at temperature 0, which takes the likeliest token; leave it out"
        draws = any(drawn.temperature for drawn in (self.evaluation, *of_suite.values()))
        is_greedy = self.evaluation.top_p < 1 and not draws
        require(not is_greedy, "evaluation.top_p", self.evaluation.top_p, greedy)
        for suite, drawn in suites.items():
            is_greedy = (drawn.top_p or 1) < 1 and not of_suite[suite].temperature
            require(not is_greedy, f"evaluation.suites.{suite}.top_p", drawn.top_p, greedy)
        most = self.rollout.max_response_tokens
        require(
            (self.evaluation.max_response_tokens or 0) <= most,
            "evaluation.max_response_tokens",
            self.evaluation.max_response_tokens,
            f"must be at most rollout.max_response_tokens = {most}, beside which every prompt is "
            "known to fit",
        )
        for suite, drawn in suites.items():
            require(
                (drawn.max_response_tokens or 0) <= most,
                f"evaluation.suites.{suite}.max_response_tokens",
                drawn.max_response_tokens,
                f"must be at most rollout.max_response_tokens = {most}, as all responses",
            )

    def _check_elastic(self, ranks: RankRange) -> None:
        """Check what a number of train workers that changes needs.

        Raises:
            ConfigError: For what does not fit it.
        """
        given = (ranks.least, ranks.most)
        require(
            not self.rollout.is_colocated,
            "scaling.num_workers",
            given,
            'must be one number with rollout.engine.placement = "colocated"',
        )
        require(
            self.train.checkpoint_every > 0,
            "train.checkpoint_every",
            self.train.checkpoint_every,
            f"must be at least 1 with scaling.num_workers = {given}: another number of train "
            "workers begins with a checkpoint",
        )


def check_attention(train: TrainConfig, *, uses_gpus: bool) -> None:
    """Check that FlashAttention 4, where it is asked for, can run.

    Raises:
        ConfigError: If it cannot.
    """
    if train.attention != "flash_attention_4":
        return
    name, given, device = "train.attention", train.attention, "cuda" if uses_gpus else "cpu"
    remedy = "needs scaling.use_gpu = True: its kernels are for Hopper GPUs; leave it out"
    require(uses_gpus, name, given, remedy)
    fits = train.packs(device) and train.dtype_on(device) == "bfloat16"
    remedy = "computes packed samples in bfloat16; leave out train.packing and train.param_dtype"
    require(fits, name, given, remedy)
    remedy = f"needs {PACKAGE}, which is not installed: pip install 'ray-apr[flash]'"
    require(installed_version(PACKAGE) is not None, name, given, remedy)


def check_placement(
    rollout: RolloutConfig,
    partial_rollout: PartialRolloutConfig,
    train: TrainConfig,
    num_train_workers: int,
) -> None:
    """Check what engines and train workers on the same GPUs need.

    Raises:
        ConfigError: If they are not as many, either goes on during the other's turn, or weights are
            to travel by what does not fit.
    """
    unfit = ("nccl", "gloo") if rollout.is_colocated else ("shared",)
    placement = rollout.engine.placement
    require(
        train.weight_transport not in unfit,
        "train.weight_transport",
        train.weight_transport,
        f'must not be {" or ".join(unfit)} with rollout.engine.placement = "{placement}"',
    )
    if not rollout.is_colocated:
        return
    why = 'with rollout.engine.placement = "colocated"'
    num_engine_workers = rollout.num_replicas * rollout.engine.tensor_parallel_size
    require(
        num_engine_workers == num_train_workers,
        "rollout.num_replicas",
        rollout.num_replicas,
        f"x tensor_parallel_size must be the number of train workers, {num_train_workers}, {why}: "
        "each GPU has one of both",
    )
    require(
        not (partial_rollout.overlap_sync and rollout.takes_turns),
        "partial_rollout.overlap_sync",
        partial_rollout.overlap_sync,
        f"must be false {why} and sleep: the engines have the trainer's GPUs while weights travel",
    )
    require(
        partial_rollout.sync_every == 1 or not rollout.takes_turns,
        "partial_rollout.sync_every",
        partial_rollout.sync_every,
        f"must be 1 {why} and sleep: engines that slept have no weights",
    )
    require(
        not train.cpu_offload,
        "train.cpu_offload",
        train.cpu_offload,
        f"must be false {why}, whose weights are gathered where the engines read them",
    )


def check_together(
    rollout: RolloutConfig,
    train: TrainConfig,
    algorithm: AlgorithmConfig,
) -> None:
    """Check what no section can check alone.

    Raises:
        ConfigError: If the batch is no multiple of the group, a group of one meets an estimator
            that compares the samples of a group, mini-batches do not fit the batch, the overlong
            buffer exceeds the response, a loss would be without its ratio, or nothing would be left
            to train.
    """
    require(
        train.batch_size % rollout.group_size == 0,
        "train.batch_size",
        train.batch_size,
        f"must be a multiple of rollout.group_size = {rollout.group_size}: groups train whole",
    )
    require(
        rollout.group_size > 1 or callable(algorithm.advantage),
        "rollout.group_size",
        rollout.group_size,
        f'must be at least 2 with algorithm.advantage = "{algorithm.advantage}", which compares '
        "the samples of one prompt",
    )
    num_groups = train.batch_size // rollout.group_size
    require(
        num_groups % train.mini_batches == 0,
        "train.mini_batches",
        train.mini_batches,
        f"must divide the {num_groups} groups of a batch (train.batch_size / rollout.group_size)",
    )
    require(
        (algorithm.overlong_buffer_tokens or 0) < rollout.max_response_tokens,
        "algorithm.overlong_buffer_tokens",
        algorithm.overlong_buffer_tokens,
        f"must be below rollout.max_response_tokens = {rollout.max_response_tokens}",
    )
    require(
        algorithm.proximal == "behavior"
        or algorithm.loss not in ("gspo", "cispo")
        or train.num_optimizer_steps > 1,
        "algorithm.proximal",
        algorithm.proximal,
        f'must be "behavior" with algorithm.loss = "{algorithm.loss}" and one optimizer step a '
        "batch (train.mini_batches x train.epochs): the proximal policy is the current one there, "
        "and the ratio that the loss is made of would be 1",
    )
    require(
        not algorithm.overlong_filter or rollout.replay_column is None,
        "algorithm.overlong_filter",
        algorithm.overlong_filter,
        "must be false with rollout.replay_column, whose responses all end at their limit",
    )
