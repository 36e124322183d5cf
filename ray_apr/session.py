"""A run that is trained a few steps at a time, with its servers up in between.

Invariants, kept by `TrainingSession`:
    * A step is trained in a call of `train`, and only there. In between, the batch of the next one
      may be chosen already: the policy version does not change.
    * Rows are returned once, in order, as they are in the run folder.
    * The run ends with the last of its steps, with an error, with `stop`, or with this
      process.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray.train import Checkpoint

from ray_apr.core.checks import is_whole, require
from ray_apr.core.exceptions import APRError, ConfigError
from ray_apr.run.final import FINAL_FILE
from ray_apr.run.folder import read_object
from ray_apr.run.resume import find_begin
from ray_apr.train.gate import Order

if TYPE_CHECKING:
    from ray_apr.trainer import APRTrainer

_END_S = 120.0
"""Limit for a run to end by itself that has trained all of its steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progressed:
    """What a run has done since it was asked last; rows as in its folder."""

    steps: Sequence[dict[str, Any]]
    """A row of ``metrics.jsonl`` for each step."""
    evaluations: Sequence[dict[str, Any]]
    """Rows of ``evaluations.jsonl`` of evaluations that have ended."""


class TrainingSession:
    """A run that is trained a few steps at a time; its servers stay up in between.

    Between two calls of `train` no step is trained. The engines go on until as much is there as the
    staleness bound allows; then they wait, however long it takes.

    Args:
        trainer: Its run starts now, and ends where its `TrainConfig` says.

    Raises:
        ConfigError: If the cluster does not hold the run, or it is to go on by itself after
            failures.

    Example:
        >>> with TrainingSession(trainer) as session:                    # doctest: +SKIP
        ...     rewards = [row["reward_mean"] for row in session.train(10).steps]
        ...     session.save("checkpoint")
    """

    def __init__(self, trainer: APRTrainer) -> None:
        if trainer.spec.max_failures:
            raise ConfigError(
                "run_config.failure_config.max_failures",
                trainer.spec.max_failures,
                "must be 0 where somebody else counts the steps; make the trainer again after a "
                "failure, which goes on with the last checkpoint",
            )
        begin = find_begin(trainer.spec, holds=False)
        self._final_before = _written_at(trainer.spec.folder / FINAL_FILE)
        self._run = trainer.start_in_host(is_gated=True)
        self._spec = self._run.spec
        self._folder = self._spec.folder  # a relative one is found from where this process is now
        self._step = self._ordered = begin.step
        self._steps = _Rows(self.folder / "metrics.jsonl")
        self._evaluations = _Rows(self.folder / "evaluations.jsonl")
        self._evaluated = frozenset(
            row["policy_version"]
            for row in _Rows(self.folder / "evaluations.jsonl").new()
            if begin.checkpoint is not None and row["policy_version"] <= begin.policy_version
        )
        """Versions that were evaluated before a run that goes on; the others are again."""
        self._is_stopped = False

    def __enter__(self) -> TrainingSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def step(self) -> int:
        """Steps trained."""
        return self._step

    @property
    def num_steps(self) -> int:
        """Steps of the whole run."""
        return self._spec.train.num_steps

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self._folder

    def train(self, num_steps: int) -> Progressed:
        """Train so many steps, or those that are left, and wait for them.

        Raises:
            ConfigError: If it is no number of steps.
            APRError: What the run failed of, or that it was stopped.
        """
        require(
            is_whole(num_steps, 1), "num_steps", num_steps, "must be a whole number of at least 1"
        )
        goal = min(self._step + num_steps, self.num_steps)
        missing = max(0, goal - self._ordered)  # a call that was interrupted has ordered its own
        self._ordered += missing
        self._follow([None] * missing)
        steps = [row for row in self._steps.new() if row["step"] >= self._step]
        evaluations = [
            row for row in self._evaluations.new() if row["policy_version"] not in self._evaluated
        ]
        self._step = self._ordered
        return Progressed(steps=steps, evaluations=evaluations)

    def save(self, folder: str | Path) -> None:
        """Write a checkpoint of where the run stands, which ``APRTrainer(checkpoint=...)`` takes.

        It is one of the run's own, too, and counts among ``train.num_checkpoints_to_keep``.

        Waits for: the run. Unblocked by: the checkpoint, or its end; it has limits of its own.

        Args:
            folder: On this node; made if it is not there.

        Raises:
            APRError: What the run failed of, or that it was stopped.
        """
        name = f"checkpoint_step_{self._step}_{uuid.uuid4().hex[:8]}"
        self._follow([] if self._has_all_steps else [name])
        if self._has_all_steps:
            saved = self._run.result().checkpoint
            assert saved is not None, "a run ends with one"
        else:
            storage = self._spec.checkpoints_folder
            saved = Checkpoint(f"{storage}/{name}", self._spec.run.storage_filesystem)
        saved.to_directory(str(folder))

    @property
    def _has_all_steps(self) -> bool:
        return self._ordered >= self.num_steps

    def _follow(self, orders: Sequence[Order]) -> None:
        """Give orders, and wait until they are done; with the last step, until the run has ended.

        Waits for: the run. Unblocked by: orders that are done, or its end; it has limits of its
        own.

        Raises:
            APRError: What the run failed of, or that it was stopped.
        """
        if self._is_stopped:
            raise APRError(f"the run {self._spec.name} was stopped")
        number = self._run.order(orders) if orders or not self._has_all_steps else None
        if self._has_all_steps or not self._run.wait(num_orders=number):
            self._run.result()

    def stop(self) -> dict[str, Any]:
        """End the run, whatever it does, and take away all of it; may be called again.

        Returns:
            The content of ``final.json``; empty if there is none, or only that of an earlier part
            of the run, as this one had not begun yet.
        """
        if not self._is_stopped:
            self._is_stopped = True
            self._run.stop(after_s=_END_S if self._has_all_steps else 0.0)
        file = self.folder / FINAL_FILE
        if _written_at(file) == self._final_before:
            return {}
        return read_object(file)


def _written_at(file: Path) -> int | None:
    """When a file was written, in ns; None if there is none."""
    return file.stat().st_mtime_ns if file.exists() else None


class _Rows:
    """Rows of a file that is written meanwhile, each once.

    Args:
        file: JSON lines; it need not be there yet.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._offset = 0

    def new(self) -> list[dict[str, Any]]:
        """Whole rows that have come since the last call."""
        if not self._file.exists():
            return []
        with self._file.open("rb") as file:
            file.seek(self._offset)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [json.loads(line) for line in whole.splitlines()]
