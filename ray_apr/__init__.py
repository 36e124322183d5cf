"""ray_apr: asynchronous RL post-training of language models with partial rollouts, on Ray.

The public names load on first use; ``import ray_apr`` alone loads neither ray, torch nor vllm.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray_apr.config import (
        AlgorithmConfig,
        BufferConfig,
        EngineConfig,
        EvaluationConfig,
        HttpConfig,
        JournalConfig,
        LoRAConfig,
        PartialRolloutConfig,
        PromptsConfig,
        RewardConfig,
        RolloutConfig,
        SamplingConfig,
        TrackersConfig,
        TrainConfig,
    )
    from ray_apr.core.exceptions import APRError, ConfigError
    from ray_apr.core.sample import Sample
    from ray_apr.core.user import Environment, RewardResult, RunCallback, RunInfo, Step
    from ray_apr.run.forking import init
    from ray_apr.session import TrainingSession
    from ray_apr.trainer import APRTrainer

__version__ = "0.1.0"

_HOMES = {
    "APRTrainer": "ray_apr.trainer",
    "RolloutConfig": "ray_apr.config",
    "PartialRolloutConfig": "ray_apr.config",
    "PromptsConfig": "ray_apr.config",
    "EngineConfig": "ray_apr.config",
    "SamplingConfig": "ray_apr.config",
    "RewardConfig": "ray_apr.config",
    "HttpConfig": "ray_apr.config",
    "JournalConfig": "ray_apr.config",
    "BufferConfig": "ray_apr.config",
    "EvaluationConfig": "ray_apr.config",
    "AlgorithmConfig": "ray_apr.config",
    "LoRAConfig": "ray_apr.config",
    "TrackersConfig": "ray_apr.config",
    "TrainConfig": "ray_apr.config",
    "APRError": "ray_apr.core.exceptions",
    "ConfigError": "ray_apr.core.exceptions",
    "Sample": "ray_apr.core.sample",
    "RewardResult": "ray_apr.core.user",
    "Environment": "ray_apr.core.user",
    "RunCallback": "ray_apr.core.user",
    "RunInfo": "ray_apr.core.user",
    "Step": "ray_apr.core.user",
    "TrainingSession": "ray_apr.session",
    "init": "ray_apr.run.forking",
}

__all__ = [
    "APRError",
    "APRTrainer",
    "AlgorithmConfig",
    "BufferConfig",
    "ConfigError",
    "EngineConfig",
    "Environment",
    "EvaluationConfig",
    "HttpConfig",
    "JournalConfig",
    "LoRAConfig",
    "PartialRolloutConfig",
    "PromptsConfig",
    "RewardConfig",
    "RewardResult",
    "RolloutConfig",
    "RunCallback",
    "RunInfo",
    "Sample",
    "SamplingConfig",
    "Step",
    "TrackersConfig",
    "TrainConfig",
    "TrainingSession",
    "init",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ray_apr' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
