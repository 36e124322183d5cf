"""Rank 0's line to the other actors (train/control.py)."""

from __future__ import annotations

import pytest

from ray_apr.config import EvaluationConfig
from ray_apr.train import control as control_module
from ray_apr.train.control import RunControl


class Actor:
    """Answers each call with its own name, which `ray.get` below notes down."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, verb: str):
        call = type("Call", (), {"remote": lambda _, *args: (f"{self._name}.{verb}", *args)})
        return call()


@pytest.mark.parametrize("evaluates", [True, False])
def test_engines_sleep_once_nothing_is_evaluated(monkeypatch, evaluates):
    waited_for: list[tuple] = []

    def get(ref, timeout):
        waited_for.append(ref)
        return {"stopped_s": 0.0}

    def wait(refs, num_returns, timeout):
        waited_for.extend(refs)
        return refs, []

    monkeypatch.setattr(control_module.ray, "get", get)
    monkeypatch.setattr(control_module.ray, "wait", wait)
    control = RunControl(
        buffer=None,
        worker=Actor("worker"),
        recorder=None,
        sync_timeout_s=5.0,
        evaluator=Actor("evaluator"),
        evaluation=EvaluationConfig(every=2) if evaluates else None,
    )
    sender = type("Sender", (), {"handles": None, "send": lambda _: None})()
    control.sleep_engines()
    for version in (0, 1, 2):
        control.broadcast(sender, version)
        waited_for.clear()
        control.sleep_engines()
    evaluation = [("evaluator.wait_until_idle",), ("evaluator.evaluate", 2)] if evaluates else []
    assert waited_for == [*evaluation, ("worker.sleep",)]


def test_shared_weights_are_released_between_reading_and_going_on(monkeypatch):
    order: list[str] = []
    monkeypatch.setattr(control_module.ray, "get", lambda ref, timeout: order.append(ref[0]) or {})
    control = RunControl(buffer=None, worker=Actor("worker"), recorder=None, sync_timeout_s=5.0)
    acts = {
        "handles": {"gpu": []},
        "send": lambda _: order.append("send"),
        "release": lambda _: order.append("release"),
    }
    control.broadcast(type("Sender", (), acts)(), 3)
    assert order == [
        "worker.begin_sync", "send", "worker.wait_until_read", "release", "worker.finish_sync",
    ]  # fmt: skip
