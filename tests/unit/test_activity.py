"""What an engine says of its time (serve/vllm/activity.py)."""

from __future__ import annotations

from ray_apr.serve.vllm.activity import Activity
from ray_apr.serve.vllm.names import PARKING_LIMIT_S


def test_the_start_is_a_span_and_in_no_sum(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("ray_apr.serve.vllm.activity.unix_s", lambda: clock[0])
    activity = Activity()
    clock[0] = 130.0
    activity.start()
    clock[0] = 131.0
    activity.set_running(1)
    clock[0] = 133.0
    activity.set_paused(True)
    clock[0] = 133.5
    assert activity.drain() == (
        ("start", 100.0, 130.0),
        ("idle", 130.0, 131.0),
        ("generate", 131.0, 133.0),
        ("paused", 133.0, 133.5),
    )
    assert activity.seconds == {"idle": 1.0, "generate": 2.0, "paused": 0.5}
    assert activity.uptime_s == 3.5


def test_the_time_of_requests_is_that_of_each_of_them_while_the_engine_generates(monkeypatch):
    """known fault: their number at each look, once a second, was taken for that of the second. Of
    short bursts of requests most seconds had none."""
    clock = [0.0]
    monkeypatch.setattr("ray_apr.serve.vllm.activity.unix_s", lambda: clock[0])
    activity = Activity()
    for at, num_running in ((1.0, 2), (1.25, 3), (1.5, 0), (4.0, 1)):
        clock[0] = at
        activity.set_running(num_running)
    clock[0] = 5.0
    activity.set_paused(True)  # its request is frozen
    clock[0] = 7.0
    activity.set_running(2)
    activity.set_paused(False)
    clock[0] = 7.5
    activity.drain()
    assert activity.request_s == 2 * 0.25 + 3 * 0.25 + 1.0 + 2 * 0.5
    assert activity.seconds["generate"] == 0.5 + 1.0 + 0.5


def test_an_engine_works_while_the_calls_of_its_requests_are_on_their_way(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("ray_apr.serve.vllm.activity.unix_s", lambda: clock[0])
    activity = Activity()
    activity.set_running(3)
    activity.num_kept = 2  # the third one may not stay
    activity.set_paused(True)
    clock[0] = 1.0
    activity.set_running(0)
    activity.set_paused(False)
    clock[0] = 1.5
    activity.set_running(1)
    clock[0] = 1.75
    activity.set_running(0)
    clock[0] = 2.0
    activity.drain()
    assert activity.seconds == {"paused": 1.0, "generate": 1.0, "idle": 0.0}
    assert activity.request_s == 2 * 1.0
    clock[0] = 1.0 + PARKING_LIMIT_S
    activity.drain()
    clock[0] += 1.0
    activity.drain()
    assert activity.seconds["idle"] == PARKING_LIMIT_S
