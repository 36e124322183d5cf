"""A plan of a run, for tests of what follows from one."""

from __future__ import annotations

from typing import Any

import ray.train

from ray_apr.config import (
    AlgorithmConfig,
    BufferConfig,
    PartialRolloutConfig,
    RolloutConfig,
    TrainConfig,
)
from ray_apr.run_plan import RunPlan


def run_plan(**replaced: Any) -> RunPlan:
    """A plan of defaults, with some of its parts replaced."""
    parts: dict[str, Any] = {
        "model": "none",
        "reward": None,
        "environment": None,
        "group_filter": None,
        "max_model_len": None,
        "rollout": RolloutConfig(),
        "partial_rollout": PartialRolloutConfig.preset("apr"),
        "buffer": BufferConfig(),
        "algorithm": AlgorithmConfig(),
        "evaluation": None,
        "train": TrainConfig(),
        "scaling": ray.train.ScalingConfig(),
        "run": ray.train.RunConfig(name="app"),
    }
    return RunPlan(**parts | replaced)
