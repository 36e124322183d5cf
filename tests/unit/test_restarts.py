"""A run that fails goes on by itself, as often as it may (run/restarts.py)."""

from __future__ import annotations

import pytest
from ray.exceptions import ActorDiedError

from ray_apr.core.exceptions import (
    ConfigError,
    LedgerError,
    RanksChange,
    ResourceError,
    Stopped,
    TrainError,
    WeightMismatchError,
)
from ray_apr.run.restarts import run_with_restarts


class Attempts:
    """Attempts that fail as said, and reach the steps that are said; the last one ends well."""

    def __init__(self, *errors, steps=(0,) * 20, unread=None) -> None:
        self.errors, self.steps, self.unread = list(errors), list(steps), unread
        self.pauses: list[float] = []
        self.said: list[str] = []

    def attempt(self) -> str:
        if self.errors:
            raise self.errors.pop(0)
        return "done"

    def run(self, max_failures: int) -> str:
        return run_with_restarts(
            self.attempt, max_failures=max_failures, num_steps=9, last_step=self.last_step,
            show=self.said.append, sleep=self.pauses.append,
        )  # fmt: skip

    def last_step(self) -> int:
        if self.unread is not None:
            raise self.unread
        return self.steps.pop(0)


def test_a_run_goes_on_as_often_as_it_may():
    attempts = Attempts(TrainError("a worker died"), ActorDiedError())
    assert attempts.run(2) == "done"
    assert attempts.said[0] == (
        "failed: a worker died; goes on with its last checkpoint in 1 s (restart 1 of 2)"
    )
    assert "restart 2 of 2" in attempts.said[1]


def test_a_change_of_train_workers_is_no_failure():
    attempts = Attempts(*(RanksChange("node ab is gone") for _ in range(3)))
    assert attempts.run(0) == "done"
    assert attempts.said[0] == (
        "train workers change: node ab is gone; goes on with its last checkpoint in 1 s"
    )


@pytest.mark.parametrize("most", [0, 1, 2])
def test_the_last_error_is_the_runs_own(most):
    attempts = Attempts(*(TrainError(str(i)) for i in range(9)))
    with pytest.raises(TrainError, match=str(most)):
        attempts.run(most)
    assert len(attempts.said) == most


def test_the_pause_grows_while_no_checkpoint_is_added():
    errors = [TrainError("again")] * 12
    attempts = Attempts(*errors, steps=[0, 0, 0, 4, 4, 8, 8, 8, 8, 8, 8, 8, 8])
    assert attempts.run(-1) == "done"
    assert attempts.pauses == [1, 2, 4, 1, 2, 1, 2, 4, 8, 16, 32, 60]
    assert "restart 12 of any number" in attempts.said[-1]


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("prompts", "none", "give some"), LedgerError("one is missing"),
        WeightMismatchError("off by one"), Stopped(),
    ],
)  # fmt: skip
def test_what_would_come_again_ends_the_run(error):
    attempts = Attempts(error)
    with pytest.raises(type(error)):
        attempts.run(-1)
    assert not attempts.said


def test_a_failure_after_the_last_step_is_the_runs_own():
    attempts = Attempts(TrainError("the export failed"), steps=[9])
    with pytest.raises(TrainError, match="the export failed"):
        attempts.run(-1)
    assert not attempts.said


def test_a_run_whose_checkpoints_cannot_be_read_ends_with_what_it_failed_of():
    attempts = Attempts(TrainError("a worker died"), unread=ResourceError("no network"))
    with pytest.raises(TrainError, match="a worker died") as caught:
        attempts.run(-1)
    assert caught.value.__notes__ == ["the run does not go on: no network"]
