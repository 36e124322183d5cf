"""Ray's own logger callbacks follow a run without Ray Tune (run/ray_loggers.py)."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from ray.air.integrations.mlflow import MLflowLoggerCallback
from ray.air.integrations.wandb import WandbLoggerCallback
from ray.tune import Callback
from ray.tune.logger import (
    CSVLoggerCallback,
    JsonLoggerCallback,
    LoggerCallback,
    TBXLoggerCallback,
)

from ray_apr.core.exceptions import ConfigError
from ray_apr.core.user import RunInfo
from ray_apr.run.folder import add_row
from ray_apr.run.options import RunOptions
from ray_apr.run.ray_loggers import FOLDER, as_run_callback
from tests.tracked import Together, read_tensorboard, wandb_history

CONFIG = {"train": {"steps": 3, "betas": [0.9, 0.95]}, "model": "base"}


class Told(LoggerCallback):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def setup(self, **info):
        self.calls.append("setup")

    def log_trial_start(self, trial):
        self.calls.append(("start", str(trial), trial.config["model"]))

    def log_trial_result(self, iteration, trial, result):
        self.calls.append((iteration, result))

    def log_trial_save(self, trial):
        self.calls.append(("save", trial.checkpoint.path))

    def log_trial_end(self, trial, failed=False):
        self.calls.append(("end", failed))

    def on_experiment_end(self, trials, **info):
        self.calls.append(("over", len(trials)))


def follow(folder: Path, callback: Any, *steps: int, status: str = "ok") -> None:
    """A run that trains some steps, with an evaluation before the second one and at the end."""
    followed = Together(folder, [as_run_callback(callback)], lambda: [(1, "/a")])
    followed.start("mine", CONFIG)
    for step in steps:
        row = {"step": step, "time_s": step / 2, "reward_mean": step / 4, "waiting_for": ""}
        add_row(folder / "metrics.jsonl", row)
        followed.look()
        if step in (0, steps[-1]):
            row = {"policy_version": step + 1, "reward_mean": 1.0}
            add_row(folder / "evaluations.jsonl", row)
            followed.look()
    (folder / "final.json").write_text(json.dumps({"status": status}))
    followed.look(is_end=True)
    followed.end()


def test_a_logger_is_told_what_ray_tune_would_tell_it(tmp_path: Path) -> None:
    told = Told()
    follow(tmp_path, told, 0, 1, 2)
    calls = told.calls
    assert calls[:2] == ["setup", ("start", "mine", "base")]
    results = [call for call in calls if isinstance(call[0], int)]
    assert [number for number, _ in results] == [1, 2, 3, 3]
    evaluated = [result["evaluation"]["policy_version"] for _, result in results
                 if "evaluation" in result]  # fmt: skip
    assert evaluated == [1, 3], "with the next step, or at the end"
    (_, first) = results[0]
    assert first["training_iteration"] == 1 and first["reward_mean"] == 0.0
    assert {"trial_id", "timestamp", "time_total_s"} <= first.keys()
    assert [call for call in calls if call[0] == "save"] == [("save", "/a")]
    assert calls[-2:] == [("end", False), ("over", 1)]


def test_two_evaluations_after_the_last_step_are_both_told(tmp_path: Path) -> None:
    told = Told()
    logger = as_run_callback(told)
    logger.on_start(
        RunInfo(name="mine", folder=tmp_path, config=CONFIG, notes={}, is_resumed=False)
    )
    logger.on_step({"step": 0})
    for version in (1, 2):
        logger.on_evaluation({"policy_version": version})
    logger.on_end({"status": "ok"})
    results = [call[1] for call in told.calls if isinstance(call[0], int)]
    evaluations = [result.get("evaluation", {}) for result in results]
    assert [found.get("policy_version") for found in evaluations] == [None, 1, 2]


@pytest.mark.parametrize(("status", "failed"), [("failed", True), ("stopped", False)])
def test_a_logger_hears_of_a_failure(tmp_path: Path, status: str, failed: bool) -> None:
    told = Told()
    follow(tmp_path, told, 0, status=status)
    assert told.calls[-2] == ("end", failed)


def test_files_of_ray_tune(tmp_path: Path) -> None:
    follow(tmp_path, JsonLoggerCallback(), 0, 1)
    folder = tmp_path / FOLDER
    rows = [json.loads(line) for line in (folder / "result.json").read_text().splitlines()]
    assert [row["training_iteration"] for row in rows] == [1, 2, 2]
    assert json.loads((folder / "params.json").read_text()) == CONFIG
    follow(tmp_path, JsonLoggerCallback(), 2)
    rows = [json.loads(line) for line in (folder / "result.json").read_text().splitlines()]
    assert [row["training_iteration"] for row in rows] == [1, 2, 2, 3, 3], "gone on with"
    assert len({row["trial_id"] for row in rows}) == 1

    (tmp_path / "other").mkdir()
    follow(tmp_path / "other", CSVLoggerCallback(), 0, 1)
    with (tmp_path / "other" / FOLDER / "progress.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [line["reward_mean"] for line in lines] == ["0.0", "0.25", "0.25"]


def test_event_files_of_ray_tune(tmp_path: Path) -> None:
    follow(tmp_path, TBXLoggerCallback(), 0, 1)
    found = read_tensorboard(tmp_path, FOLDER)
    assert found["ray/tune/reward_mean", 2] == 0.25
    assert found["ray/tune/evaluation/reward_mean", 2] == 1.0


def test_mlflow_of_ray(tmp_path: Path) -> None:
    from mlflow.tracking import MlflowClient

    url = f"sqlite:///{tmp_path}/m.db"
    follow(tmp_path, MLflowLoggerCallback(tracking_uri=url, experiment_name="e"), 0, 1)
    client = MlflowClient(url)
    (run,) = client.search_runs([client.get_experiment_by_name("e").experiment_id])
    assert run.info.status == "FINISHED" and run.info.run_name == "mine"
    history = client.get_metric_history(run.info.run_id, "reward_mean")
    assert [(metric.step, metric.value) for metric in history] == [(1, 0.0), (2, 0.25), (2, 0.25)]
    assert run.data.params["model"] == "base"


@pytest.mark.ray
@pytest.mark.long
def test_wandb_of_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    monkeypatch.setenv("WANDB_MODE", "offline")
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    try:
        follow(tmp_path, WandbLoggerCallback(project="p"), 0, 1)
        rows = wandb_history(tmp_path / FOLDER)
    finally:
        ray.shutdown()
    assert [row.get("reward_mean") for row in rows] == [0.0, 0.25]
    assert rows[1]["evaluation/reward_mean"] == 1.0


def options(callback: Any) -> RunOptions:
    return RunOptions(model="a/b", prompts=None, reward=len, callbacks=[callback])


def test_what_is_no_logger_is_refused() -> None:
    assert [c.name for c in options(JsonLoggerCallback()).run_callbacks] == ["JsonLoggerCallback"]
    for given in (Callback(), print):
        with pytest.raises(ConfigError, match="must be objects of a RunCallback, or of a ray"):
            options(given)

    class CometLoggerCallback(LoggerCallback):
        """As Ray's is called, whose package is not installed."""

    with pytest.raises(ConfigError, match="'CometLoggerCallback': was not tried outside of Ray"):
        options(CometLoggerCallback())
