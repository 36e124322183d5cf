"""How the rollout servers end (serve/lease.py, serve/builder.py)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RaySystemError

from ray_apr.serve import builder
from ray_apr.serve import lease as lease_module
from ray_apr.serve.lease import RunLease


def test_a_lease_ends_with_its_holder_and_takes_the_servers_away(monkeypatch):
    """known fault: a driver that was killed left the Serve application and its GPUs behind."""
    answers = [None, GetTimeoutError(), ActorUnavailableError("network", None), ActorDiedError()]
    done: list[str] = []
    lease = lease_of(monkeypatch, answers, done)
    monkeypatch.setattr(lease_module, "stop_rollout_servers", done.append)
    lease._watch()
    assert (answers, done) == ([], ["app", "the lease"])


def test_a_lease_goes_on_after_an_error_that_says_nothing_of_its_holder(monkeypatch, caplog):
    answers = [RaySystemError("the object store is full"), ActorDiedError()]
    done: list[str] = []
    lease = lease_of(monkeypatch, answers, done)
    monkeypatch.setattr(lease_module, "stop_rollout_servers", done.append)
    lease._watch()
    assert (answers, done) == ([], ["app", "the lease"])
    assert "the object store is full" in caplog.text
    assert "the driver of app or the run's recorder is gone" in caplog.text


def test_a_lease_whose_servers_cannot_be_stopped_ends_all_the_same(monkeypatch):
    done: list[str] = []
    lease = lease_of(monkeypatch, [ActorDiedError()], done)

    def stop(name):
        raise KeyError(name)

    monkeypatch.setattr(lease_module, "stop_rollout_servers", stop)
    with pytest.raises(KeyError):
        lease._watch()
    assert done == ["the lease"]


def lease_of(monkeypatch, answers, done) -> RunLease:
    """One whose holder gives these answers; what it kills goes to `done`."""

    def get(ref, timeout):
        assert timeout > ref, "the call has a limit beyond its own"
        if error := answers.pop(0):
            raise error

    monkeypatch.setattr(lease_module.ray, "get", get)
    monkeypatch.setattr(lease_module.ray, "kill", done.append)
    me = SimpleNamespace(current_actor="the lease")
    monkeypatch.setattr(lease_module.ray, "get_runtime_context", lambda: me)
    monkeypatch.setattr(lease_module, "_PAUSE_S", 0.0)
    lease = object.__new__(RunLease)
    lease._app_name = "app"
    lease._holder, lease._namespace = "the recorder", "ours"
    holder = SimpleNamespace(hold=SimpleNamespace(remote=lambda seconds: seconds))
    named = {("the recorder", "ours"): holder}

    def get_actor(name, namespace):
        if (name, namespace) not in named:
            raise ValueError(f"Failed to look up actor {name!r}")
        return named[name, namespace]

    monkeypatch.setattr(lease_module.ray, "get_actor", get_actor)
    return lease


def test_a_lease_that_starts_again_after_its_holder_has_died_finds_none(monkeypatch):
    lease = lease_of(monkeypatch, [], [])
    lease._holder = "another"
    assert not lease.is_held()


@pytest.mark.parametrize("applications", [{"app": None}, {}])
def test_servers_that_serve_is_slow_to_delete_hide_no_other_error(
    monkeypatch, caplog, applications
):
    """`serve.delete` gives up after a minute, with Python's own TimeoutError."""

    def delete(name):
        raise TimeoutError("not deleted within 60 s")

    shut: list[str] = []
    monkeypatch.setattr(builder.serve, "status", lambda: SimpleNamespace(applications=applications))
    monkeypatch.setattr(builder.serve, "delete", delete)
    monkeypatch.setattr(builder.serve, "shutdown", lambda: shut.append("Serve"))
    builder.stop_rollout_servers("app")
    assert ("not deleted within 60 s" in caplog.text) == bool(applications)
    assert shut == ([] if applications else ["Serve"])
