"""The actors that Ray Train waits for are begun ahead (compat/ray.py), without Ray."""

from __future__ import annotations

import pytest
from ray.data._internal.cluster_autoscaler import default_autoscaling_coordinator
from ray.train.v2._internal.state import state_actor

from ray_apr.compat.ray import begin_actors_of_train
from ray_apr.run import training

COORDINATOR, STATE = "get_or_create_autoscaling_coordinator", "get_or_create_state_actor"


@pytest.mark.parametrize(
    ("tracking", "begun"),
    [
        (None, [COORDINATOR]),
        ("0", [COORDINATOR]),
        ("1", [COORDINATOR, STATE]),
        ("True", [COORDINATOR, STATE]),
    ],
)
def test_the_actors_are_those_that_the_trainer_will_ask_for(monkeypatch, tracking, begun):
    called: list[str] = []
    monkeypatch.setattr(
        default_autoscaling_coordinator, COORDINATOR, lambda: called.append(COORDINATOR)
    )
    monkeypatch.setattr(state_actor, STATE, lambda: called.append(STATE))
    monkeypatch.delenv("RAY_TRAIN_ENABLE_STATE_TRACKING", raising=False)
    if tracking is not None:
        monkeypatch.setenv("RAY_TRAIN_ENABLE_STATE_TRACKING", tracking)
    begin_actors_of_train()
    assert called == begun


def test_the_actors_are_begun_before_a_thread_imports_the_same_modules(monkeypatch):
    """known fault: of two threads that import Ray Data's scaling at once one ends with an error."""
    begun: list[str] = []
    monkeypatch.setattr(training, "begin_actors_of_train", lambda: begun.append("actors"))
    monkeypatch.setattr(training, "begin_imports", begun.append)
    training.begin_train()
    assert begun == ["actors", "ray.train.torch"]
