"""Sections of a settings file that Python has no class for, as Ray's own are in their place.

Importing this module loads neither ray, torch nor vllm.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ray_apr.cli.push import check_repo
from ray_apr.config.ranks import RankRange
from ray_apr.core.exceptions import ConfigError
from ray_apr.data.resumption import LIST_FILE, PROGRESS_FILE
from ray_apr.run.folder import absolute, check_run_name, check_storage, is_remote


@dataclass(frozen=True, kw_only=True)
class ScalingSettings:
    """Train workers, each one process of the TorchTrainer."""

    num_workers: int | tuple[int, int] = 1
    """Or least and most of them, as [1, 2]: as many as there is room for (docs/clusters.md)."""
    elastic_resize_monitor_interval_s: float = 60.0
    """Seconds from one look to the next whether there is room for more."""
    use_gpu: bool = False
    """Give every train worker one GPU."""
    num_cpus_per_worker: float = 1.0
    """Ray CPUs that a train worker reserves."""

    def __post_init__(self) -> None:
        ranks = self.ranks
        if ranks.is_elastic:
            object.__setattr__(self, "num_workers", (ranks.least, ranks.most))
        interval_s = self.elastic_resize_monitor_interval_s
        _require_at_least("scaling.elastic_resize_monitor_interval_s", interval_s, 0)
        _require_at_least("scaling.num_cpus_per_worker", self.num_cpus_per_worker, 0)

    @property
    def ranks(self) -> RankRange:
        """Least and most train workers."""
        return RankRange.of(self.num_workers)

    @property
    def resources_per_worker(self) -> dict[str, float]:
        """What `ray.train.ScalingConfig` reserves for one worker, beside its GPU."""
        return {"CPU": self.num_cpus_per_worker}


@dataclass(frozen=True, kw_only=True)
class RunFolderSettings:
    """Where the run's figures and checkpoints go: ``<storage_path>/<name>``; with a URI the figures
    go to ``runs/<name>``."""

    name: str | None = None
    """None: `load_settings` makes one of the YAML file's name, the mode and the time."""
    storage_path: str = "runs"
    """A folder, relative to where the command is started; on several nodes one that they share. Or
    the URI of a remote storage, such as s3://bucket/runs, for the checkpoints."""
    checkpoint: str | None = None
    """Folder of another run's checkpoint, relative to where the command is started, or its URI. The
    run begins with its weights, optimizer, step, policy version, and the prompts that come next;
    None: with the model."""
    resume: bool = False
    """Go on with the run of this name from its last checkpoint on, if there is one; without, a name
    that is taken is refused."""
    max_failures: int = 0
    """How often the run goes on by itself after a failure; -1: any number of times."""
    push_to_hub: str | None = None
    """Repository of the Hugging Face Hub, as owner/name, that gets the trained model and its card
    when the run has ended."""
    hub_private: bool = True
    """Whether that repository is private if it is made then; one that is there stays as it is."""

    def __post_init__(self) -> None:
        _require_at_least("run.max_failures", self.max_failures, -1)
        if self.push_to_hub is not None:
            check_repo("run.push_to_hub", self.push_to_hub)
        elif not self.hub_private:
            remedy = "has no use without a repository: give run.push_to_hub, too, or leave it out"
            raise ConfigError("run.hub_private", self.hub_private, remedy)
        if self.resume and self.name is None:
            raise ConfigError("run.resume", True, "needs the run to go on with: set run.name, too")
        check_storage("run.storage_path", self.storage_path)
        if self.name is not None:
            check_run_name("run.name", self.name)
        if self.checkpoint is not None:
            _check_checkpoint(self.checkpoint)

    @property
    def checkpoint_path(self) -> str | None:
        """Absolute path of `checkpoint`, or its URI."""
        return None if self.checkpoint is None else absolute(self.checkpoint)


@dataclass(frozen=True, kw_only=True)
class RaySettings:
    """How Ray is started, or which cluster is joined."""

    num_cpus: int | None = None
    """CPUs of a cluster that the run starts; None takes those of this machine. One that it joins
    because of RAY_ADDRESS has its own."""
    address: str | None = None
    """"local" starts a cluster here, even if one runs; "auto" joins the one that runs here, and an
    address that one. None joins that of the environment variable RAY_ADDRESS, as inside of a Ray
    job, and starts one where there is none."""
    namespace: str = "ray_apr"
    """Of Ray, in which the run's actors have their names."""

    def __post_init__(self) -> None:
        _require_at_least("ray.num_cpus", self.num_cpus, 1)
        if self.address not in (None, "local") and self.num_cpus is not None:
            raise ConfigError(
                "ray.num_cpus",
                self.num_cpus,
                "a cluster that is joined has its own CPUs; leave it out",
            )


def _require_at_least(name: str, value: float | None, minimum: int) -> None:
    if value is not None and not minimum <= value < float("inf"):
        raise ConfigError(name, value, f"must be at least {minimum}")


def _check_checkpoint(value: str) -> None:
    """Check that a checkpoint on this machine is one of a run; of others nothing is asked."""
    check_storage("run.checkpoint", value)
    folder = Path(value).expanduser()
    if is_remote(value) or (folder / PROGRESS_FILE).is_file():
        return
    remedy = f"must be the folder of a checkpoint, which has a file {PROGRESS_FILE}, or null"
    if (folder / LIST_FILE).is_file():
        remedy += "; this is the folder of a run: name one of the checkpoint_... in it"
    else:
        remedy += "; a run that goes on with a checkpoint of its own needs none"
    raise ConfigError("run.checkpoint", value, remedy)
