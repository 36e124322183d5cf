"""Settings: frozen keyword-only dataclasses that check themselves at construction.

Each check names the field, the value and the remedy (`ConfigError`). No module here loads ray or
torch, so that a bad setting is found before anything starts.
"""

from __future__ import annotations

from ray_apr.config.algorithm import AlgorithmConfig
from ray_apr.config.autoscaling import AutoscalingConfig
from ray_apr.config.engine import EngineConfig
from ray_apr.config.engine_version import (
    check_attestation,
    goes_on_across_syncs,
    installed_vllm,
    parks_requests,
)
from ray_apr.config.evaluation import EvaluationConfig, SuiteConfig
from ray_apr.config.http import HttpConfig
from ray_apr.config.journal import JournalConfig
from ray_apr.config.partial_rollout import KVCache, Mode, OnStale, PartialRolloutConfig
from ray_apr.config.prompts import OnTooLong, PromptsConfig
from ray_apr.config.reward import RewardConfig
from ray_apr.config.rollout import RolloutConfig
from ray_apr.config.sampling import SamplingConfig
from ray_apr.config.sections import Sections, check_placement, check_together
from ray_apr.config.trackers import TrackersConfig
from ray_apr.config.train import BufferConfig, LoRAConfig, TrainConfig

__all__ = [
    "AlgorithmConfig",
    "AutoscalingConfig",
    "BufferConfig",
    "EngineConfig",
    "EvaluationConfig",
    "HttpConfig",
    "JournalConfig",
    "KVCache",
    "LoRAConfig",
    "Mode",
    "OnStale",
    "OnTooLong",
    "PartialRolloutConfig",
    "PromptsConfig",
    "RewardConfig",
    "RolloutConfig",
    "SamplingConfig",
    "Sections",
    "SuiteConfig",
    "TrackersConfig",
    "TrainConfig",
    "check_attestation",
    "check_placement",
    "check_together",
    "goes_on_across_syncs",
    "installed_vllm",
    "parks_requests",
]
