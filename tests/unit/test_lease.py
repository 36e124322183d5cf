"""The lease of the rollout servers (serve/lease.py)."""

from __future__ import annotations

from types import SimpleNamespace

from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError

from ray_apr.serve import lease as lease_module
from ray_apr.serve.lease import RunLease


def test_a_lease_ends_with_its_holder_and_takes_the_servers_away(monkeypatch):
    """known fault: a driver that was killed left the Serve application and its GPUs behind."""
    answers = [None, GetTimeoutError(), ActorUnavailableError("network", None), ActorDiedError()]
    done: list[str] = []

    def get(ref, timeout):
        assert timeout > ref, "the call has a limit beyond its own"
        if error := answers.pop(0):
            raise error

    monkeypatch.setattr(lease_module.ray, "get", get)
    monkeypatch.setattr(lease_module.ray, "kill", done.append)
    me = SimpleNamespace(current_actor="the lease")
    monkeypatch.setattr(lease_module.ray, "get_runtime_context", lambda: me)
    monkeypatch.setattr(lease_module, "stop_rollout_servers", done.append)
    monkeypatch.setattr(lease_module, "_PAUSE_S", 0.0)
    lease = object.__new__(RunLease)
    lease._app_name = "app"
    lease._holder = SimpleNamespace(hold=SimpleNamespace(remote=lambda seconds: seconds))
    lease._watch()
    assert (answers, done) == ([], ["app", "the lease"])
