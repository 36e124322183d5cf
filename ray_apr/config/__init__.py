"""Settings: frozen keyword-only dataclasses that check themselves at construction.

Each check names the field, the value and the remedy (`ConfigError`). No module here loads ray or
torch, so that a bad setting is found before anything starts.
"""

from __future__ import annotations

from ray_apr.checks import require
from ray_apr.config.algorithm import AlgorithmConfig
from ray_apr.config.engine_version import check_attestation, goes_on_across_syncs, installed_vllm
from ray_apr.config.evaluation import EvaluationConfig
from ray_apr.config.partial_rollout import KVCache, Mode, OnStale, PartialRolloutConfig, ResumeOrder
from ray_apr.config.rollout import RolloutConfig
from ray_apr.config.train import BufferConfig, LoRAConfig, TrainConfig

__all__ = [
    "AlgorithmConfig",
    "BufferConfig",
    "EvaluationConfig",
    "KVCache",
    "LoRAConfig",
    "Mode",
    "OnStale",
    "PartialRolloutConfig",
    "ResumeOrder",
    "RolloutConfig",
    "TrainConfig",
    "check_attestation",
    "check_placement",
    "check_together",
    "goes_on_across_syncs",
    "installed_vllm",
]


def check_placement(
    rollout: RolloutConfig,
    partial_rollout: PartialRolloutConfig,
    train: TrainConfig,
    num_train_workers: int,
) -> None:
    """Check what engines and train workers that take turns need.

    Raises:
        ConfigError: If they are not as many, either goes on during the other's turn, or weights are
            to travel by what does not fit.
    """
    unfit = ("nccl", "gloo") if rollout.is_colocated else ("shared",)
    require(
        train.weight_transport not in unfit,
        "train.weight_transport",
        train.weight_transport,
        f'must not be {" or ".join(unfit)} with rollout.placement = "{rollout.placement}"',
    )
    if not rollout.is_colocated:
        return
    why = 'with rollout.placement = "colocated"'
    num_engine_workers = rollout.num_replicas * rollout.tensor_parallel_size
    require(
        num_engine_workers == num_train_workers,
        "rollout.num_replicas",
        rollout.num_replicas,
        f"x tensor_parallel_size must be the number of train workers, {num_train_workers}, {why}: "
        "each GPU has one of both",
    )
    require(
        not partial_rollout.overlap_sync,
        "partial_rollout.overlap_sync",
        partial_rollout.overlap_sync,
        f"must be false {why}: the trainer cannot go on while its weights travel",
    )
    require(
        partial_rollout.sync_every == 1,
        "partial_rollout.sync_every",
        partial_rollout.sync_every,
        f"must be 1 {why}: engines that slept have no weights",
    )
    require(
        not train.cpu_offload,
        "train.cpu_offload",
        train.cpu_offload,
        f"must be false {why}, which keeps the trainer on the host between its turns",
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
