"""A run of MLflow."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from ray_apr.config.trackers import MLflowConfig, TrackersConfig
from ray_apr.core.clock import unix_s
from ray_apr.core.user import RunCallback, RunInfo
from ray_apr.trackers.rows import SampleTables, numbers, texts

_STATUS = {"ok": "FINISHED", "stopped": "KILLED"}
_MOST_PARAMS = 100
"""Of one call; as MLflow limits it."""
_LONGEST_PARAM = 6000
_NOT_TAKEN = re.compile(r"[^\w\-./ ]")
"""Characters that names of MLflow must not have."""
_NO_NAMES = ("", ".", "..")
"""What must not be between two ``/`` of them."""
_LONGEST_NAME = 250


class MLflowTracker(RunCallback):
    """Writes figures as metrics, settings as parameters, tables of samples as artifacts; of what is
    no number the last value is a tag.

    Args:
        config: Where to.
        shared: Of all trackers.
    """

    name = "mlflow"

    def __init__(self, config: MLflowConfig, shared: TrackersConfig) -> None:
        self._config = config
        self._shared = shared
        self._step = -1
        self._tags: dict[str, str] = {}
        """As MLflow has them."""

    def on_start(self, run: RunInfo) -> None:
        """Begin a run of MLflow, or go on with the one that the run has."""
        import mlflow.entities  # here, beside the start of the engines, as it takes seconds
        import mlflow.tracking

        self._tables, self._entities = SampleTables(run, self._shared), mlflow.entities
        self._client = client = mlflow.tracking.MlflowClient(self._config.tracking_uri)
        if "run_id" in run.notes:
            self._id = run.notes["run_id"]
            client.update_run(self._id, status="RUNNING")
        else:
            experiment = client.get_experiment_by_name(self._config.experiment)
            where = experiment and experiment.experiment_id
            where = where or client.create_experiment(self._config.experiment)
            self._id = run.notes["run_id"] = client.create_run(where, run_name=run.name).info.run_id
        if run.is_resumed:
            return
        params = [mlflow.entities.Param(*param) for param in _params(run.config)]
        for begin in range(0, len(params), _MOST_PARAMS):
            client.log_batch(self._id, params=params[begin : begin + _MOST_PARAMS])

    def on_step(self, row: Mapping[str, Any]) -> None:
        """Metrics of a step, and now and then a table of samples."""
        self._step = row["step"]
        self._add(row, "", self._step)
        self._add_samples(self._step)

    def on_evaluation(self, row: Mapping[str, Any]) -> None:
        """Metrics of an evaluation, at its policy version."""
        self._add(row, "evaluation/", row["policy_version"])

    def on_end(self, final: Mapping[str, Any]) -> None:
        """End the run of MLflow as the run did."""
        self._add_samples(self._step + 1)
        self._client.log_text(self._id, json.dumps(final, indent=2), "final.json")
        self._client.set_terminated(self._id, _STATUS.get(str(final.get("status")), "FAILED"))

    def _add_samples(self, step: int) -> None:
        for of_step, rows in self._tables.due(step):
            text = json.dumps(rows, indent=1, ensure_ascii=False)
            self._client.log_text(self._id, text, f"samples/step-{of_step:06d}.json")

    def _add(self, row: Mapping[str, Any], prefix: str, step: int) -> None:
        now_ms = int(unix_s() * 1000)
        metrics = [
            self._entities.Metric(metric_name(n), v, now_ms, step) for n, v in numbers(row, prefix)
        ]
        tags = dict((metric_name(n), text) for n, text in texts(row, prefix))
        changed = [self._entities.RunTag(*tag) for tag in tags.items() - self._tags.items()]
        self._client.log_batch(self._id, metrics=metrics, tags=changed)
        self._tags |= tags  # not before: what MLflow did not take is sent with the next row


def metric_name(name: str) -> str:
    """A name as MLflow takes it: with ``_`` for what is no letter, digit, space or ``_-./``, and
    for what is no name between two ``/``; of a long one the begin.

    Example:
        >>> metric_name("reward//strict (a)_mean")
        'reward/_/strict _a__mean'
    """
    parts = _NOT_TAKEN.sub("_", name).split("/")
    taken = "/".join("_" if part in _NO_NAMES else part for part in parts)
    return taken[:_LONGEST_NAME].rstrip("/")


def _params(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _params(value, f"{prefix}{name}.")
        else:
            yield metric_name(f"{prefix}{name}"), str(value)[:_LONGEST_PARAM]
