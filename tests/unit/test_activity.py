"""What an engine says of its time (serve/vllm/activity.py)."""

from __future__ import annotations

from ray_apr.serve.vllm.activity import Activity


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
