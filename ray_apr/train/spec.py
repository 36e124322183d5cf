"""What a train worker is started with: one frozen value, the same for all of a run's.

What it needs to know for its steps alone is apart (`LearnerSpec`): that suffices to replay them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ray_apr.config import AlgorithmConfig, EvaluationConfig, PartialRolloutConfig, TrainConfig
from ray_apr.config.common import DType
from ray_apr.core.messages import SamplingParams
from ray_apr.data.fence import Fence
from ray_apr.data.parts import PartName
from ray_apr.data.resumption import Begin


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerSpec:
    """What is trained, and how."""

    model: str
    """Folder or hub id."""
    train: TrainConfig
    algorithm: AlgorithmConfig
    sampling: SamplingParams
    """How the rollouts are drawn: the distribution that is trained."""
    max_response_tokens: int
    """Budget of a response, for the overlong punishment."""
    num_replicas: int
    """Engines, with which the cores of a node are divided on CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec(LearnerSpec):
    """One train worker; handles and names are those of Ray actors."""

    run: str
    """Name of the run, which its metrics carry."""
    partial_rollout: PartialRolloutConfig
    evaluation: EvaluationConfig | None
    """None: nothing is evaluated."""
    start_timeout_s: float
    """Limit for the engines to become ready, in seconds."""
    wire_dtype: DType
    """Of the weights on their way: that of the engines."""
    shares_device: bool
    """Whether engines are on the train workers' devices, too."""
    takes_turns: bool
    """Whether they have these in turns."""
    buffer: PartName
    """The sample buffer."""
    worker: PartName
    """The rollout worker."""
    recorder: Any
    """Handle of what writes the run folder."""
    evaluator: Any = None
    """Handle; None where nothing is evaluated."""
    fence: Fence | None = None
    """Of the folder of the checkpoints; None: nobody else takes it."""
    gate: Any = None
    """Handle of the `StepGate` whose orders are followed; None: all steps are taken."""
    begin: Begin = field(default_factory=Begin)
    """Where the run begins."""
    started_at: float
    """Unix time at which the run began, in seconds."""
