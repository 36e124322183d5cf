"""Trackers of experiments as callbacks of a run: W&B, MLflow, TensorBoard."""

from __future__ import annotations

from ray_apr.config.trackers import TrackersConfig
from ray_apr.core.user import RunCallback


def trackers_of(config: TrackersConfig | None) -> tuple[RunCallback, ...]:
    """The callbacks that some settings ask for; their packages are imported when the run begins."""
    found: list[RunCallback] = []
    if config is None:
        return ()
    if config.wandb is not None:
        from ray_apr.trackers.wandb import WandbTracker

        found.append(WandbTracker(config.wandb, config))
    if config.mlflow is not None:
        from ray_apr.trackers.mlflow import MLflowTracker

        found.append(MLflowTracker(config.mlflow, config))
    if config.tensorboard is not None:
        from ray_apr.trackers.tensorboard import TensorBoardTracker

        found.append(TensorBoardTracker(config.tensorboard, config))
    return tuple(found)
