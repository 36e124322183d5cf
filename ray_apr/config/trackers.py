"""Settings of trackers of experiments."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ray_apr.core.checks import at_least, from_mapping, of_type, one_of, require, whole

_Mode = Literal["online", "offline", "disabled"]


_NOT_TAKEN = "/\\#?%:"
"""Characters that the name of a project of W&B must not have."""
_LONGEST_PROJECT, _LONGEST_TAG = 128, 64
_FOLDERS = "MLFLOW_ALLOW_FILE_STORE"
"""MLflow's variable, without which it takes no folder for its store, from 3.13 on."""


def _needs(module: str, section: str, value: Any) -> None:
    require(
        importlib.util.find_spec(module) is not None,
        section,
        value,
        f"needs {module}, which is not installed: pip install 'ray-apr[trackers]'",
    )


def _asks_for_folders() -> bool:
    """Whether MLflow has its variable for folders, from 3.13 on; its import takes seconds."""
    spec = importlib.util.find_spec("mlflow")
    variables = Path((spec and spec.origin) or "").parent / "environment_variables.py"
    return variables.is_file() and _FOLDERS in variables.read_text(encoding="utf-8")


@dataclass(frozen=True, kw_only=True)
class WandbConfig:
    """A run of Weights & Biases; what it needs of secrets it reads from its own variables."""

    project: str = "ray_apr"
    """Where the run is listed."""
    entity: str | None = None
    """User or team; None: the default of the account."""
    group: str | None = None
    """Runs of one group are shown together."""
    tags: tuple[str, ...] = ()
    """Words to find the run by."""
    mode: _Mode = "online"
    """offline: into the run folder, for ``wandb sync``."""

    def __post_init__(self) -> None:
        s = "trackers.wandb"
        words = "a list of texts"
        of_type(s, self, list | tuple, words, "tags")
        require(all(isinstance(tag, str) for tag in self.tags), f"{s}.tags", self.tags, words)
        object.__setattr__(self, "tags", tuple(self.tags))
        wrong = [tag for tag in self.tags if not 0 < len(tag) <= _LONGEST_TAG]
        require(not wrong, f"{s}.tags", wrong, f"must have 1 to {_LONGEST_TAG} characters each")
        of_type(s, self, str, "a text", "project")
        is_taken = 0 < len(self.project) <= _LONGEST_PROJECT and not {*self.project} & {*_NOT_TAKEN}
        remedy = f"must have 1 to {_LONGEST_PROJECT} characters, none of them of {_NOT_TAKEN}"
        require(is_taken, f"{s}.project", self.project, remedy)
        of_type(s, self, str | None, "a text, or null", "entity", "group")
        one_of(s, self, {"mode": _Mode})
        _needs("wandb", s, self)


@dataclass(frozen=True, kw_only=True)
class MLflowConfig:
    """A run of MLflow."""

    tracking_uri: str | None = None
    """A server, or ``sqlite:///file.db``; None: ``MLFLOW_TRACKING_URI``. A folder needs
    ``MLFLOW_ALLOW_FILE_STORE=true`` from MLflow 3.13 on, which takes none by itself."""
    experiment: str = "ray_apr"
    """Where the run is listed."""

    def __post_init__(self) -> None:
        s = "trackers.mlflow"
        of_type(s, self, str, "a text", "experiment")
        of_type(s, self, str | None, "a text, or null", "tracking_uri")
        require(self.experiment.strip() != "", f"{s}.experiment", self.experiment, "must be a name")
        uri = self.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or "sqlite:///mlflow.db"
        is_folder = uri.startswith("file:") or not (":" in uri or uri.startswith("databricks"))
        remedy = (
            f"is a folder, which MLflow refuses; name sqlite:///FILE.db, or set {_FOLDERS}=true"
        )
        _needs("mlflow", s, self)
        are_taken = os.environ.get(_FOLDERS, "").lower() in ("true", "1")
        is_refused = is_folder and not are_taken and _asks_for_folders()
        require(not is_refused, f"{s}.tracking_uri", uri, remedy)


@dataclass(frozen=True, kw_only=True)
class TensorBoardConfig:
    """Event files for TensorBoard."""

    folder: str | None = None
    """Where they go; None: ``tensorboard/`` of the run folder."""

    def __post_init__(self) -> None:
        s = "trackers.tensorboard"
        of_type(s, self, str | None, "a text, or null", "folder")
        _needs("tensorboardX", s, self)


_KINDS: Mapping[str, type] = {
    "wandb": WandbConfig,
    "mlflow": MLflowConfig,
    "tensorboard": TensorBoardConfig,
}


@dataclass(frozen=True, kw_only=True)
class TrackersConfig:
    """Which trackers follow a run; each gets every key of metrics.jsonl, the settings, evaluations,
    and tables of samples. Mappings of settings will do."""

    wandb: WandbConfig | None = None
    """Weights & Biases; null: without."""
    mlflow: MLflowConfig | None = None
    """MLflow; null: without."""
    tensorboard: TensorBoardConfig | None = None
    """TensorBoard; null: without. An empty mapping takes the defaults."""
    samples_every: int = 10
    """Steps from one table of samples to the next; 0 makes none. Needs `train.save_samples`."""
    samples_each: int = 16
    """Samples of a table: the worst and the best of its step."""

    def __post_init__(self) -> None:
        for name, cls in _KINDS.items():
            given: Any = getattr(self, name)
            if isinstance(given, Mapping):
                object.__setattr__(self, name, from_mapping(cls, f"trackers.{name}", given))
            of_type("trackers", self, cls | None, "a mapping of settings, or null", name)
        whole("trackers", self, "samples_every", "samples_each")
        at_least("trackers", self, 0, "samples_every")
        at_least("trackers", self, 1, "samples_each")
