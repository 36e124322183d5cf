"""What a run is made of, and what follows from that for its parts.

YAML (`settings`) and `APRTrainer` make the same `RunSpec`, which `run.checks` has checked; nothing
in it changes any more, its name included.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import uuid
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray.train

from ray_apr.config import Sections
from ray_apr.config.common import TRAINER_GPU_SHARE, dtype_on
from ray_apr.config.engine import Device
from ray_apr.config.ranks import RankRange
from ray_apr.core.exceptions import ConfigError, FolderTakenError
from ray_apr.core.imports import finish_imports
from ray_apr.core.user import Environment, GroupFilter, RewardFunction
from ray_apr.data.fence import Fence
from ray_apr.run.command import Command
from ray_apr.run.folder import CHECKPOINTS, is_remote, run_folder
from ray_apr.run.retention import AgedCheckpoints

RESTARTS = ("max_failures", "controller_failure_limit", "max_preemption_failures")
"""Fields of Ray Train's `FailureConfig` that start train workers again; Ray before 2.60 has not all
of them."""


@dataclass(frozen=True, kw_only=True)
class RunSpec(Sections):
    """Everything that a run is made of."""

    name: str
    """Name of the run; also of its folder and its Serve application."""
    model: str
    """Folder or hub id."""
    reward: RewardFunction | None = None
    environment: Environment | None = None
    group_filter: GroupFilter | None = None
    max_model_len: int | None = None
    """Longest prompt + response, in tokens; None: that of a model whose config is not here yet."""
    ranks: RankRange
    """Least and most train workers."""
    scaling: ray.train.ScalingConfig
    """What they reserve, and their number; where it may change, that is chosen when the parts of
    the run are made (`run.ranks`)."""
    run: ray.train.RunConfig
    """What the user gives Ray Train; `run_config` is what it gets."""
    checkpoint: ray.train.Checkpoint | None = None
    """What a run begins with that has no checkpoint of its own; None: with the model."""
    owner: str = field(default_factory=lambda: uuid.uuid4().hex, compare=False)
    """Name of this start of the run, for its `fences`."""
    command: Command | None = None
    """What the run folder keeps for ``ray-apr resume``; None: the run was begun in Python."""

    def on_devices(self, *, has_gpus: bool) -> RunSpec:
        """The same with devices and data types that were left to the cluster.

        Args:
            has_gpus: Whether the cluster has any.
        """
        engine, train = self.rollout.engine, self.train
        device: Device = engine.device
        if device == "auto":
            device = "cuda" if has_gpus else "cpu"
        engine = replace(engine, device=device, dtype=dtype_on(device, engine.dtype))
        of_train = train.dtype_on("cuda" if self.scaling.use_gpu else "cpu")
        return replace(
            self,
            rollout=replace(self.rollout, engine=engine),
            train=replace(train, param_dtype=of_train),
        )

    def with_replicas(self, num_replicas: int) -> RunSpec:
        """The same with another number of engines."""
        return replace(self, rollout=replace(self.rollout, num_replicas=num_replicas))

    @property
    def max_failures(self) -> int:
        """How often the run goes on by itself after a failure; -1: any number of times."""
        failures = self.run.failure_config
        return 0 if failures is None else failures.max_failures

    @property
    def batches(self) -> dict[str, Any]:
        """How groups become batches: arguments of `Stock`, and of the `SampleBuffer` around it."""
        return {
            "batch_size": self.step_size,
            "max_staleness": self.partial_rollout.max_staleness,
            "on_stale": self.partial_rollout.on_stale,
            "num_ranks": self.scaling.num_workers,
            "micro_batch_tokens": self.train.micro_batch_tokens,
            "mini_batches": self.train.mini_batches,
            "packed": self.train.packs("cuda" if self.scaling.use_gpu else "cpu"),
            "num_steps": self.train.num_steps,
        }

    @property
    def folder(self) -> Path:
        """The run folder: Ray Train's own, or one under ``runs/`` if that is on remote storage."""
        return run_folder(str(self.run.storage_path or "runs"), self.name)

    @property
    def checkpoint_path(self) -> str:
        """Where Ray Train keeps checkpoints: remote storage, or beside the run folder."""
        return self.remote_storage or str(self.folder.parent)

    @property
    def checkpoints_folder(self) -> str:
        """Where the run's own checkpoints are, with Ray Train's list of them."""
        return f"{self.checkpoint_path.rstrip('/')}/{self.name}"

    @property
    def fences(self) -> tuple[Fence, Fence]:
        """Of the run folder, and of that of the checkpoints, which may be the same."""
        kept = ray.train.Checkpoint(self.checkpoints_folder, self.run.storage_filesystem)
        of_checkpoints = Fence(self.owner, kept.path, kept.filesystem)
        return Fence(self.owner, str(self.folder)), of_checkpoints

    def check_owner(self) -> None:
        """Look whether the run is this driver's still, before it writes.

        Raises:
            FolderTakenError: If another one has taken it over.
        """
        for fence in self.fences:
            fence.check()

    @property
    def taken_over(self) -> FolderTakenError | None:
        """That another driver has taken the run over, if one has."""
        try:
            self.check_owner()
        except FolderTakenError as error:
            return error
        return None

    @property
    def remote_storage(self) -> str | None:
        """Where Ray Train writes, if that is no folder of a file system."""
        storage = str(self.run.storage_path or "")
        return storage if is_remote(storage) else None

    @property
    def most_requests(self) -> int:
        """Samples and evaluations that can be alive at once, in an engine or on the way to one."""
        return self.partial_rollout.most_requests(self.step_size, self.evaluation)

    @property
    def worker_scaling(self) -> ray.train.ScalingConfig:
        """What the train workers reserve: beside an engine, what it has left of a GPU."""
        if not (self.rollout.is_colocated and self.scaling.use_gpu):
            return self.scaling
        resources = {**(self.scaling.resources_per_worker or {}), "GPU": TRAINER_GPU_SHARE}
        return dataclasses.replace(self.scaling, resources_per_worker=resources)

    @property
    def run_config(self) -> ray.train.RunConfig:
        """What Ray Train gets: where it keeps how many checkpoints for how long, and that it starts
        no train worker again, which would have other weights and steps than buffer and servers: all
        parts begin again together (`run.restarts`)."""
        known = {field.name for field in dataclasses.fields(ray.train.FailureConfig)}
        return dataclasses.replace(
            self.run,
            name=self.name,
            storage_path=self.checkpoint_path,
            checkpoint_config=self._checkpoints_to_keep,
            failure_config=ray.train.FailureConfig(**{n: 0 for n in RESTARTS if n in known}),
        )

    @property
    def _checkpoints_to_keep(self) -> ray.train.CheckpointConfig:
        checkpoints = self.run.checkpoint_config or ray.train.CheckpointConfig()
        number = checkpoints.num_to_keep or self.train.num_checkpoints_to_keep
        hours = self.train.hours_to_keep_checkpoints
        if hours is None:
            return dataclasses.replace(checkpoints, num_to_keep=number)
        kept = ray.train.Checkpoint(self.checkpoints_folder, self.run.storage_filesystem)
        return AgedCheckpoints(number, hours=hours, storage=kept.filesystem, folder=kept.path)

    @property
    def torch_backend(self) -> str | None:
        """Of the train workers' collectives; None leaves it to Ray Train. Shards that are kept on
        the host are gathered there for checkpoints."""
        return "cpu:gloo,cuda:nccl" if self.train.cpu_offload and self.scaling.use_gpu else None

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
            finish_imports()
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
        """The run's settings as plain values, where remote checkpoints are, and digests of files of
        the user's functions and environment; the control token is left out."""
        sections = {
            name: dataclasses.asdict(getattr(self, name))
            for name in (
                "prompts", "rollout", "partial_rollout", "buffer", "algorithm", "train",
            )
        }  # fmt: skip
        sections["rollout"]["http"].pop("control_token")
        if callable(self.rollout.engine.factory):
            sections["rollout"]["engine"]["factory"] = _name(self.rollout.engine.factory)
        if callable(self.train.weight_transport):
            sections["train"]["weight_transport"] = _name(self.train.weight_transport)
        if self.evaluation is not None:
            named = {suite: _name(reward) for suite, reward in self.evaluation.rewards.items()}
            plain = replace(self.evaluation, rewards={})  # what a function holds is not copied
            sections["evaluation"] = dataclasses.asdict(plain) | {"rewards": named}
        for section, names in RULES.items():
            for name in names:
                if callable(sections[section][name]):
                    sections[section][name] = _name(sections[section][name])
        objective = {
            f"algorithm.{name}": getattr(self.algorithm, name) for name in RULES["algorithm"]
        }
        user = {name: getattr(self, name) for name in ("reward", "environment", "group_filter")}
        files = {**user, "environment": type(self.environment), **objective}
        digests = {name: digest for name, code in files.items() if (digest := _digest(code))}
        least, most = dataclasses.astuple(self.ranks)
        workers = (least, most) if self.ranks.is_elastic else most
        scaling = {"num_workers": workers, "use_gpu": bool(self.scaling.use_gpu)}
        code = {name: _name(value) for name, value in user.items()}
        described = {"model": self.model, **code, **sections, "scaling": scaling}
        if self.remote_storage is not None:
            described[CHECKPOINTS] = self.checkpoints_folder
        return described | {"digests": digests}


RULES = {
    "algorithm": ("advantage", "loss", "correction"),
    "partial_rollout": ("admission", "resume_order"),
}
"""Settings in whose places code of the user's may stand."""


def _name(code: object) -> str | None:
    """Where a function, or the class of an object, is defined."""
    if code is None:
        return None
    named = code if hasattr(code, "__qualname__") else type(code)
    return f"{named.__module__}:{named.__qualname__}"


def _digest(code: object) -> str | None:
    """SHA-256 of the file that defines a function; None of what is no code or has no file."""
    if not callable(code):
        return None
    try:
        file = inspect.getsourcefile(code)
    except (TypeError, OSError):  # an object, or of a compiled module; a class of a notebook
        return None
    if file is None or not Path(file).is_file():
        return None
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()
