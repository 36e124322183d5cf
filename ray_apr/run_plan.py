"""What a run is made of, and what follows from that for its parts."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray.train

from ray_apr.architectures import check_config
from ray_apr.config import (
    AlgorithmConfig,
    BufferConfig,
    EvaluationConfig,
    PartialRolloutConfig,
    RolloutConfig,
    TrainConfig,
)
from ray_apr.config.common import TRAINER_GPU_SHARE
from ray_apr.exceptions import ConfigError
from ray_apr.protocols import Environment, GroupFilter, RewardFunction

RESTARTS = ("max_failures", "controller_failure_limit", "max_preemption_failures")
"""Fields of Ray Train's `FailureConfig` that start train workers again; Ray before 2.60 has not all
of them."""


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """Everything that a run is made of, checked."""

    model: str
    reward: RewardFunction | None
    environment: Environment | None
    group_filter: GroupFilter | None
    max_model_len: int | None
    rollout: RolloutConfig
    partial_rollout: PartialRolloutConfig
    buffer: BufferConfig
    algorithm: AlgorithmConfig
    evaluation: EvaluationConfig | None
    """None evaluates nothing."""
    train: TrainConfig
    scaling: ray.train.ScalingConfig
    run: ray.train.RunConfig
    checkpoint: ray.train.Checkpoint | None = None
    """What a run begins with that has no checkpoint of its own; None: with the model."""

    @property
    def name(self) -> str:
        """Name of the run; also of its Serve application."""
        return self.run.name or f"apr-{self.partial_rollout.mode}-{int(time.time())}"

    @property
    def step_size(self) -> int:
        """Samples of one optimizer step."""
        return self.partial_rollout.step_size(self.train.batch_size)

    @property
    def folder(self) -> Path:
        """The run folder: Ray Train's own, or one under ``runs/`` if that is on remote storage."""
        root = Path("runs" if self.remote_storage else self.run.storage_path or "runs")
        return root.expanduser().resolve() / self.name

    @property
    def checkpoint_path(self) -> str:
        """Where Ray Train keeps checkpoints: remote storage, or beside the run folder."""
        return self.remote_storage or str(self.folder.parent)

    @property
    def remote_storage(self) -> str | None:
        """Where Ray Train writes, if that is no folder of a file system."""
        storage = str(self.run.storage_path or "")
        return storage if "://" in storage else None

    @property
    def worker_scaling(self) -> ray.train.ScalingConfig:
        """What the train workers reserve: beside an engine, what it has left of a GPU."""
        if not (self.rollout.is_colocated and self.scaling.use_gpu):
            return self.scaling
        resources = {**(self.scaling.resources_per_worker or {}), "GPU": TRAINER_GPU_SHARE}
        return dataclasses.replace(self.scaling, resources_per_worker=resources)

    @property
    def run_config(self) -> ray.train.RunConfig:
        """What Ray Train gets: where it keeps how many checkpoints, and that it starts no train
        worker again, which would have other weights and steps than buffer and servers."""
        checkpoints = self.run.checkpoint_config
        if checkpoints is None or checkpoints.num_to_keep is None:
            keep = self.train.num_checkpoints_to_keep
            checkpoints = ray.train.CheckpointConfig(num_to_keep=keep)
        known = {field.name for field in dataclasses.fields(ray.train.FailureConfig)}
        return dataclasses.replace(
            self.run,
            storage_path=self.checkpoint_path,
            checkpoint_config=checkpoints,
            failure_config=ray.train.FailureConfig(**{n: 0 for n in RESTARTS if n in known}),
        )

    @property
    def torch_backend(self) -> str | None:
        """Of the train workers' collectives; None leaves it to Ray Train. Shards that are kept on
        the host are gathered there for checkpoints."""
        return "cpu:gloo,cuda:nccl" if self.train.cpu_offload and self.scaling.use_gpu else None

    def check_model(self, *, is_here: bool = False) -> None:
        """Refuse a hub id's model that cannot be trained, once its config can be read; a folder's
        was checked before.

        Args:
            is_here: Read only what is on this machine.

        Raises:
            ConfigError: If it is refused, or cannot be had.
        """
        if Path(self.model).is_dir():
            return
        from transformers import PretrainedConfig

        try:
            config = PretrainedConfig.get_config_dict(self.model, local_files_only=is_here)[0]
        except OSError as error:
            reason = " ".join(str(error).split())
            raise ConfigError(
                "model", self.model, f"is no folder, and the hub does not give it: {reason}"
            ) from error
        check_config(self.model, config)

    def max_prompt_tokens(self, *, is_here: bool = False) -> int:
        """Longest prompt that leaves room for the response budget.

        Args:
            is_here: Of a model on the hub, read only what is on this machine.

        Raises:
            ConfigError: If none does.
            OSError: If the model cannot be had.
        """
        context = self.max_model_len
        if context is None:
            from transformers import AutoConfig

            config = AutoConfig.from_pretrained(self.model, local_files_only=is_here)
            context = int(config.max_position_embeddings)
        longest = context - self.rollout.max_response_tokens
        if longest < 1:
            raise ConfigError(
                "rollout.max_response_tokens",
                self.rollout.max_response_tokens,
                f"leaves no room for a prompt in the model's context of {context} tokens",
            )
        return longest

    def describe(self) -> dict[str, Any]:
        """The run's settings as plain values; the control token is left out."""
        sections = {
            name: dataclasses.asdict(getattr(self, name))
            for name in ("rollout", "partial_rollout", "buffer", "algorithm", "train")
        }
        sections["rollout"].pop("control_token")
        if callable(self.rollout.engine):
            sections["rollout"]["engine"] = _name(self.rollout.engine)
        if callable(self.train.weight_transport):
            sections["train"]["weight_transport"] = _name(self.train.weight_transport)
        if self.evaluation is not None:
            sections["evaluation"] = dataclasses.asdict(self.evaluation)
        for name in ("advantage", "loss", "correction"):
            if callable(sections["algorithm"][name]):
                sections["algorithm"][name] = _name(sections["algorithm"][name])
        scaling = {"num_workers": self.scaling.num_workers, "use_gpu": bool(self.scaling.use_gpu)}
        code = {
            name: _name(getattr(self, name)) for name in ("reward", "environment", "group_filter")
        }
        return {"model": self.model, **code, **sections, "scaling": scaling}


def _name(code: object) -> str | None:
    """Where a function, or the class of an object, is defined."""
    if code is None:
        return None
    named = code if hasattr(code, "__qualname__") else type(code)
    return f"{named.__module__}:{named.__qualname__}"
