"""Settings: frozen keyword-only dataclasses that check themselves at construction.

Each check names the field, the value and the remedy (`ConfigError`). No module here loads ray or
torch, so that a bad setting is found before anything starts.
"""

from __future__ import annotations

from ray_apr.checks import require
from ray_apr.config.algorithm import AlgorithmConfig
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
    "check_together",
]


def check_together(
    rollout: RolloutConfig,
    train: TrainConfig,
    algorithm: AlgorithmConfig,
) -> None:
    """Check what no section can check alone.

    Raises:
        ConfigError: If the batch is no multiple of the group, a group of one meets an estimator
            that compares the samples of a group, mini-batches do not fit the batch, or the overlong
            buffer exceeds the response.
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
