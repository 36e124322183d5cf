"""Values that cross processes, by one import: `core` has them."""

from __future__ import annotations

from ray_apr.core.group import GroupMeta, SampleMeta
from ray_apr.core.messages import (
    Generation,
    Origin,
    SamplingParams,
    ServerStatus,
    WeightGroupState,
    WeightScores,
)
from ray_apr.core.sample import FinishReason, Prompt, Sample, SampleState, Segment, pack_ids
from ray_apr.core.user import MAX_REWARD_METRICS, RewardResult, Step

__all__ = [
    "MAX_REWARD_METRICS",
    "FinishReason",
    "Generation",
    "GroupMeta",
    "Origin",
    "Prompt",
    "RewardResult",
    "Sample",
    "SampleMeta",
    "SampleState",
    "SamplingParams",
    "Segment",
    "ServerStatus",
    "Step",
    "WeightGroupState",
    "WeightScores",
    "pack_ids",
]
