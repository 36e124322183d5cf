"""A run of Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray_apr.config.trackers import TrackersConfig, WandbConfig
from ray_apr.core.user import RunCallback, RunInfo
from ray_apr.trackers.rows import COLUMNS, SampleTables, numbers, texts


class WandbTracker(RunCallback):
    """Writes figures and tables of samples; each series has its own axis: the step of the run, or
    the policy version of an evaluation.

    Args:
        config: Where to.
        shared: Of all trackers.
    """

    name = "wandb"

    def __init__(self, config: WandbConfig, shared: TrackersConfig) -> None:
        self._config = config
        self._shared = shared
        self._step = -1

    def on_start(self, run: RunInfo) -> None:
        """Begin a run of W&B, or go on with the one that the run has."""
        import wandb  # here, beside the start of the engines, as it takes a second

        self._tables, self._table = SampleTables(run, self._shared), wandb.Table
        given = self._config
        self._run = wandb.init(
            project=given.project,
            entity=given.entity,
            group=given.group,
            tags=given.tags,
            mode=given.mode,
            name=run.name,
            id=run.notes.get("run_id"),
            resume="allow",
            dir=str(run.folder),
            config=dict(run.config),
            # create_new: else it is the run that this process has already, the user's or another's;
            # without such a one `wandb.log` of a callback of the user's goes into this one
            settings=wandb.Settings(
                console="off", silent=True, reinit="create_new" if wandb.run else "default"
            ),
        )
        run.notes["run_id"] = self._run.id
        self._run.define_metric("*", step_metric="step")
        self._run.define_metric("evaluation/*", step_metric="evaluation/policy_version")

    def on_step(self, row: Mapping[str, Any]) -> None:
        """Figures of a step, and now and then a table of samples."""
        self._step = row["step"]
        self._run.log({**dict(numbers(row)), **dict(texts(row))})
        self._log_samples(self._step)

    def on_evaluation(self, row: Mapping[str, Any]) -> None:
        """Figures of an evaluation."""
        self._run.log({**dict(numbers(row, "evaluation/")), **dict(texts(row, "evaluation/"))})

    def on_end(self, final: Mapping[str, Any]) -> None:
        """End the run of W&B as the run did."""
        self._log_samples(self._step + 1)
        self._run.summary.update({f"final/{name}": v for name, v in numbers(final)})
        self._run.finish(exit_code=0 if final.get("status") == "ok" else 1)

    def _log_samples(self, step: int) -> None:
        for of_step, rows in self._tables.due(step):
            data = [[sample[name] for name in COLUMNS] for sample in rows]
            table = self._table(columns=list(COLUMNS), data=data)
            self._run.log({"step": of_step, "samples": table})
