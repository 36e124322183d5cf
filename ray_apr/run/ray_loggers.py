"""Ray's own logger callbacks (`ray.tune.logger.LoggerCallback`) as callbacks of a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray.train

from ray_apr.core.checks import answers_at_once, require
from ray_apr.core.clock import unix_s
from ray_apr.core.exceptions import ConfigError
from ray_apr.core.user import RunCallback, RunInfo

FOLDER = "ray_loggers"
"""Of the run folder: what such callbacks write beside it."""
_UNTRIED = ("AimLoggerCallback", "CometLoggerCallback")


def as_run_callback(given: Any) -> RunCallback:
    """A callback of a run, of what a user gives as one.

    Raises:
        ConfigError: If it is neither a `RunCallback` nor a logger callback of Ray's, or one that
            was not tried outside of Ray Tune, or a method of it is async or called by no run.
    """
    if isinstance(given, RunCallback):
        known = [name for name in vars(RunCallback) if name.startswith("on_")]
        own = [cls for cls in type(given).__mro__ if issubclass(cls, RunCallback)]
        for name in (name for cls in own for name in vars(cls) if name.startswith("on_")):
            method = getattr(given, name)
            remedy = (
                f"has {name}, which no run calls; those that are called are {', '.join(known)}; "
                "rename one that you call yourself"
            )
            is_called = name in known or not callable(method)
            require(is_called, "callbacks", type(given).__qualname__, remedy)
            answers_at_once("callbacks", method)
        return given
    from ray.tune.logger import LoggerCallback

    if not isinstance(given, LoggerCallback):
        remedy = "must be objects of a RunCallback, or of a ray.tune.logger.LoggerCallback"
        raise ConfigError("callbacks", given, remedy)
    untried = [cls.__name__ for cls in type(given).__mro__ if cls.__name__ in _UNTRIED]
    if untried:
        remedy = (
            "was not tried outside of Ray Tune; take one of the section `trackers`, write a "
            "RunCallback, or have Tune run the trainer"
        )
        raise ConfigError("callbacks", untried[0], remedy)
    return RayLogger(given)


class RunAsTrial:
    """What logger callbacks read of a trial of Ray Tune.

    Args:
        run: What they follow.
        trial_id: Stays where the run is gone on with.
    """

    trainable_name = "APRTrainer"
    experiment_tag = ""
    node_ip = None
    checkpoint: ray.train.Checkpoint | None = None
    """The newest one, once it is there."""

    def __init__(self, run: RunInfo, trial_id: str) -> None:
        self.trial_id = trial_id
        self.config = dict(run.config)
        self.evaluated_params: dict[str, Any] = {}
        self.experiment_dir_name = run.folder.name
        self.local_experiment_path = str(run.folder)
        self.local_path = self.path = str(run.folder / FOLDER)
        self._name = run.name

    def __str__(self) -> str:
        """Name of the run, which trackers show."""
        return self._name

    def init_local_path(self) -> None:
        """Make the folder that a callback writes into."""
        Path(self.local_path).mkdir(parents=True, exist_ok=True)


class RayLogger(RunCallback):
    """Tells a logger callback of Ray's of a run as Ray Tune tells it of a trial.

    A result is a row of the run with ``training_iteration``, the number of trained steps, and
    ``trial_id``, ``timestamp`` and ``time_total_s``, as Tune gives them. An evaluation is in the
    result of the next step, as ``evaluation``.

    Args:
        callback: Of Ray's.
    """

    def __init__(self, callback: Any) -> None:
        self.name = getattr(callback, "name", None) or type(callback).__qualname__
        self._callback = callback
        self._evaluation: dict[str, Any] = {}
        self._iteration = 0
        self._row: Mapping[str, Any] = {}

    def on_start(self, run: RunInfo) -> None:
        """Set it up, and begin its trial."""
        from ray.tune.experiment import Trial

        trial_id = run.notes.setdefault("trial_id", Trial.generate_id())
        self._trial = RunAsTrial(run, trial_id)
        self._trial.init_local_path()
        self._callback.setup()
        self._tell("on_trial_start")

    def on_step(self, row: Mapping[str, Any]) -> None:
        """Give a result."""
        self._iteration, self._row = row["step"] + 1, row
        self._give()

    def on_evaluation(self, row: Mapping[str, Any]) -> None:
        """Keep it for the next result: of the next step, or the last one's once more, where another
        evaluation or the end comes first."""
        if self._evaluation and self._row:
            self._give()
        self._evaluation = {"evaluation": dict(row)}

    def on_checkpoint(self, step: int, path: str) -> None:
        """Say that there is a checkpoint."""
        self._trial.checkpoint = ray.train.Checkpoint(path)
        self._tell("on_trial_save")

    def on_end(self, final: Mapping[str, Any]) -> None:
        """End its trial."""
        if self._evaluation:
            self._give()
        is_failed = final.get("status") == "failed"
        self._tell("on_trial_error" if is_failed else "on_trial_complete")
        self._callback.on_experiment_end([self._trial])

    def _give(self) -> None:
        result = {
            **self._row,
            **self._evaluation,
            "training_iteration": self._iteration,
            "trial_id": self._trial.trial_id,
            "timestamp": int(unix_s()),
            "time_total_s": self._row.get("time_s"),
        }
        self._evaluation = {}
        self._tell("on_trial_result", result=result)

    def _tell(self, verb: str, **given: Any) -> None:
        trials = [self._trial]
        getattr(self._callback, verb)(self._iteration, trials, self._trial, **given)
