"""What a user gives to a run, and the spec that is made of it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import ray.train

from ray_apr.config import (
    AlgorithmConfig,
    BufferConfig,
    EvaluationConfig,
    PartialRolloutConfig,
    PromptsConfig,
    RolloutConfig,
    TrainConfig,
)
from ray_apr.config.ranks import RankRange
from ray_apr.config.trackers import TrackersConfig
from ray_apr.core.checks import require
from ray_apr.core.exceptions import ConfigError
from ray_apr.core.user import Environment, GroupFilter, RewardFunction, RunCallback
from ray_apr.data.rows import PromptRows
from ray_apr.run.callbacks import name_of
from ray_apr.run.command import Command
from ray_apr.run.folder import check_run_name, is_remote
from ray_apr.run.model import check_model, context_of
from ray_apr.run.ray_loggers import as_run_callback
from ray_apr.run.spec import RunSpec

if TYPE_CHECKING:
    import ray.data
    from ray.tune.logger import LoggerCallback

    Prompts: TypeAlias = ray.data.Dataset | PromptRows

_KINDS: dict[str, type] = {
    "prompts_config": PromptsConfig,
    "rollout_config": RolloutConfig,
    "partial_rollout_config": PartialRolloutConfig,
    "buffer_config": BufferConfig,
    "algorithm_config": AlgorithmConfig,
    "evaluation_config": EvaluationConfig,
    "train_config": TrainConfig,
    "scaling_config": ray.train.ScalingConfig,
    "run_config": ray.train.RunConfig,
    "trackers_config": TrackersConfig,
}
"""What each argument is that holds settings; a mapping would be none."""
_TRACKERS = ("wandb", "mlflow", "tensorboard")
"""Names of the callbacks that `trackers_config` asks for."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class RunOptions:
    """The arguments of `APRTrainer`, which says what they are; it checks the spec, too.

    Raises:
        ConfigError: If an argument is of another kind, the model or the checkpoint is not there, an
            evaluation has no prompts, a callback is none, or the number of train workers is none.
    """

    model: str
    prompts: Prompts
    reward: RewardFunction | None = None
    environment: Environment | None = None
    group_filter: GroupFilter | None = None
    evaluation_prompts: Prompts | None = None
    prompts_config: PromptsConfig | None = None
    rollout_config: RolloutConfig | None = None
    partial_rollout_config: PartialRolloutConfig | None = None
    buffer_config: BufferConfig | None = None
    algorithm_config: AlgorithmConfig | None = None
    evaluation_config: EvaluationConfig | None = None
    train_config: TrainConfig | None = None
    scaling_config: ray.train.ScalingConfig | None = None
    run_config: ray.train.RunConfig | None = None
    callbacks: Sequence[RunCallback | LoggerCallback] = ()
    trackers_config: TrackersConfig | None = None
    checkpoint: str | Path | ray.train.Checkpoint | None = None
    command: Command | None = None
    spec: RunSpec = field(init=False)
    """What the run is made of."""

    def __post_init__(self) -> None:
        for name, kind in _KINDS.items():
            given, home = getattr(self, name), kind.__module__.partition(".config")[0]
            remedy = f"must be a {home}.{kind.__name__}, or be left out"
            require(given is None or isinstance(given, kind), name, given, remedy)
        remedy = "must be the path of a folder, or a hub id as owner/name"
        require(isinstance(self.model, str | Path), "model", self.model, remedy)
        remedy = "must be a list of callbacks"
        require(isinstance(self.callbacks, Iterable), "callbacks", self.callbacks, remedy)
        object.__setattr__(self, "callbacks", tuple(self.callbacks))
        trackers = [n for n in _TRACKERS if getattr(self.trackers_config, n, None) is not None]
        names = trackers + [name_of(callback) for callback in self.run_callbacks]
        if len(set(names)) < len(names):
            raise ConfigError("callbacks", names, "must have a `name` of their own each")
        object.__setattr__(self, "spec", self._make_spec())

    @property
    def run_callbacks(self) -> tuple[RunCallback, ...]:
        """The callbacks as a run tells them."""
        return tuple(map(as_run_callback, self.callbacks))

    def _make_spec(self) -> RunSpec:
        rollout = self.rollout_config or RolloutConfig()
        partial_rollout = self.partial_rollout_config or PartialRolloutConfig()
        scaling = self.scaling_config or ray.train.ScalingConfig(num_workers=1)
        own = secrets.token_hex(2)  # else those that begin in one second share their servers
        default_name = f"apr-{partial_rollout.mode}-{int(time.time())}-{own}"
        run = self.run_config or ray.train.RunConfig(name=default_name)
        check_run_name("run_config.name", run.name or default_name)
        model, evaluation = check_model(self.model), self.evaluation_config
        if evaluation is not None and self.evaluation_prompts is None:
            remedy = "needs evaluation_prompts; give a dataset, or leave it out"
            raise ConfigError("evaluation_config", evaluation, remedy)
        if self.evaluation_prompts is not None:
            evaluation = evaluation or EvaluationConfig()
        spec = RunSpec(
            name=run.name or default_name,
            model=model,
            reward=self.reward,
            environment=self.environment,
            group_filter=self.group_filter,
            max_model_len=rollout.engine.max_model_len or context_of(model),
            prompts=self.prompts_config or PromptsConfig(),
            rollout=rollout,
            partial_rollout=partial_rollout,
            buffer=self.buffer_config or BufferConfig(),
            algorithm=self.algorithm_config or AlgorithmConfig(),
            evaluation=evaluation,
            train=self.train_config or TrainConfig(),
            ranks=RankRange.of(scaling.num_workers),
            scaling=scaling,
            run=run,
            checkpoint=_as_checkpoint(self.checkpoint),
            command=self.command,
        )
        return spec.with_steps()


def _as_checkpoint(
    given: str | Path | ray.train.Checkpoint | None,
) -> ray.train.Checkpoint | None:
    if given is None or isinstance(given, ray.train.Checkpoint):
        return given
    if not is_remote(str(given)) and not Path(given).is_dir():
        raise ConfigError("checkpoint", str(given), "no such folder")
    return ray.train.Checkpoint(str(given))
