"""How the rollout servers end (serve/lease.py, serve/builder.py)."""

from __future__ import annotations

import math
import threading
from types import SimpleNamespace

import pytest
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    GetTimeoutError,
    RaySystemError,
    RayTaskError,
)
from ray.serve.schema import ApplicationStatus

from ray_apr.compat.ray import kept_deployment
from ray_apr.core.exceptions import ResourceError
from ray_apr.run import actors as actors_module
from ray_apr.run.actors import Actors
from ray_apr.serve import builder
from ray_apr.serve import lease as lease_module
from ray_apr.serve.lease import RunLease
from tests.run_specs import run_spec


def test_a_lease_ends_with_its_holder_and_takes_the_servers_away(monkeypatch):
    """known fault: a driver that was killed left the Serve application and its GPUs behind."""
    answers = [None, GetTimeoutError(), ActorUnavailableError("network", None), ActorDiedError()]
    done: list[str] = []
    lease = lease_of(monkeypatch, answers, done)
    monkeypatch.setattr(builder, "stop_rollout_servers", done.append)
    monkeypatch.setattr(builder, "end_serve", lambda name: done.append(f"Serve after {name}"))
    lease._watch()
    assert (answers, done) == ([], ["app", "Serve after app", "the lease"])


def test_a_lease_goes_on_after_an_error_that_says_nothing_of_its_holder(monkeypatch, caplog):
    answers = [RaySystemError("the object store is full"), ActorDiedError()]
    done: list[str] = []
    lease = lease_of(monkeypatch, answers, done)
    monkeypatch.setattr(builder, "stop_rollout_servers", done.append)
    monkeypatch.setattr(builder, "end_serve", lambda name: done.append(f"Serve after {name}"))
    lease._watch()
    assert (answers, done) == ([], ["app", "Serve after app", "the lease"])
    assert "the object store is full" in caplog.text
    assert "the driver of app or the run's recorder is gone" in caplog.text


def test_a_lease_whose_servers_cannot_be_stopped_ends_all_the_same(monkeypatch):
    done: list[str] = []
    lease = lease_of(monkeypatch, [ActorDiedError()], done)

    def stop(name):
        raise KeyError(name)

    monkeypatch.setattr(builder, "stop_rollout_servers", stop)
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


class ClusterOfNames:
    """Ray, as `Actors` and leases use it: a name belongs to one actor that lives."""

    def __init__(self, monkeypatch) -> None:
        self.names: list[str] = []
        context = SimpleNamespace(namespace="ours", get_node_id=lambda: "ab" * 28)
        for ray in (lease_module.ray, actors_module.ray):
            monkeypatch.setattr(ray, "remote", lambda cls: SimpleNamespace(options=self._options))
            monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
            monkeypatch.setattr(ray, "kill", self.names.remove)
            monkeypatch.setattr(ray.util, "list_named_actors", lambda all_namespaces: self._rows())

    def _options(self, *, name: str, **_) -> SimpleNamespace:
        def remote(*_, **__) -> str:
            if name in self.names:
                raise ValueError(f"Actor with name {name!r} already exists")
            self.names.append(name)
            return name

        return SimpleNamespace(remote=remote)

    def _rows(self) -> list[dict[str, str]]:
        return [{"name": name, "namespace": "ray_apr"} for name in self.names]


def test_two_runs_of_one_name_that_begin_at_one_moment_do_not_share_their_servers(monkeypatch):
    """known fault: each found no lease of the other, and both had the engines of one."""
    cluster = ClusterOfNames(monkeypatch)
    monkeypatch.setattr(actors_module, "wait_for_lease", lambda name: None)
    first, second = Actors(run_spec(name="mine")), Actors(run_spec(name="mine"))
    first.make_recorder(0.0)
    with pytest.raises(ResourceError, match="another run named mine begins on this cluster just"):
        second.make_recorder(0.0)
    assert cluster.names == [first.name_of("recorder"), "mine-lease"], "nothing of the second"


def overviews(monkeypatch, *answers) -> list:
    """What `serve.status` answers, in turn; an exception is raised."""
    left = list(answers)

    def status():
        given = left.pop(0)
        if isinstance(given, Exception):
            raise given
        return SimpleNamespace(applications={"app": given})

    monkeypatch.setattr(builder.serve, "status", status)
    monkeypatch.setattr(builder, "_POLL_S", 0.0)
    return left


def application(status: ApplicationStatus, message: str = "") -> SimpleNamespace:
    deployments = {"engine-1": SimpleNamespace(message=message)}
    return SimpleNamespace(status=status, deployments=deployments, message="")


def test_serve_that_cannot_say_how_it_is_while_engines_come_is_asked_again(monkeypatch):
    """known fault: `serve.status()` beside a change raised, and ended the run."""
    left = overviews(
        monkeypatch,
        ValueError("<module> is not registered for pickle by value"),
        RayTaskError("status", "traceback", ValueError("user_config")),
        application(ApplicationStatus.DEPLOYING),
        application(ApplicationStatus.RUNNING),
    )
    builder._wait_until_running("app", 60.0, threading.Event())
    assert left == []


def test_engines_that_do_not_come_are_not_waited_for(monkeypatch):
    deploying = application(ApplicationStatus.DEPLOYING, "1 replica waits for CPUs")
    overviews(monkeypatch, deploying, deploying)
    with pytest.raises(
        ResourceError, match=r"not ready after 0 s .*: 1 replica waits for CPUs; do"
    ):
        builder._wait_until_running("app", 0.0, threading.Event())
    overviews(monkeypatch, application(ApplicationStatus.DEPLOY_FAILED, "no such model"))
    with pytest.raises(ResourceError, match="cannot start: no such model"):
        builder._wait_until_running("app", 60.0, threading.Event())
    overviews(monkeypatch, deploying)
    closing = threading.Event()
    closing.set()
    with pytest.raises(ResourceError, match="was cancelled"):
        builder._wait_until_running("app", 60.0, closing)


def test_serve_is_used_by_one_thread_at_a_time_or_after_a_while_by_two(monkeypatch):
    monkeypatch.setattr(builder, "_ALONE_S", 0.05)
    inside = threading.Event()
    with builder._alone():
        other = threading.Thread(target=lambda: builder._alone().__enter__() or inside.set())
        other.start()
        assert not inside.wait(0.01)
        assert inside.wait(5.0)
        other.join()
    with builder._alone():
        assert builder._SERVE.locked(), "who did not get it does not give it away"


def test_replicas_of_a_kept_deployment_go_on_when_it_is_deployed_again():
    deployment = builder.serve.deployment(SimpleNamespace, num_replicas=1)
    first, second = (kept_deployment(deployment, "01000000").options(name=n) for n in "ab")
    assert first.version == second.version == "01000000"
    assert deployment.version is None, "Serve draws one by chance"


# -- the end of the servers ------------------------------------------------------------------------


class ServeThatDeletes:
    """Serve, as `stop_rollout_servers` uses it: the application is gone after some looks."""

    def __init__(self, looks: float, *, others: tuple[str, ...] = ()) -> None:
        self.left, self.others, self.calls = looks, others, list[str]()
        self.silent_at = math.nan

    def status(self) -> SimpleNamespace:
        own = ("app",) if self.left > 0 else ()
        if self.calls:
            self.left -= 1
            if self.left == self.silent_at:
                raise ValueError("Serve is in the midst of a change")
        return SimpleNamespace(applications=dict.fromkeys((*own, *self.others)))

    def delete(self, name: str, _blocking: bool) -> None:
        assert not _blocking, "Serve's own client looks once a second"
        self.calls.append(f"delete {name}")

    def shutdown(self) -> None:
        self.calls.append("shutdown")


@pytest.fixture
def serve_that(monkeypatch):
    def build(*args, **options) -> ServeThatDeletes:
        serve = ServeThatDeletes(*args, **options)
        monkeypatch.setattr(builder, "serve", serve)
        monkeypatch.setattr(builder, "_LOOK_S", 0.001)
        return serve

    return build


def test_servers_are_looked_at_until_they_are_gone(serve_that):
    serve = serve_that(3)
    builder.stop_rollout_servers("app")
    assert (serve.left, serve.calls) == (-1, ["delete app"])


def test_a_look_that_serve_does_not_answer_is_one_more_look(serve_that, caplog):
    serve = serve_that(3)
    serve.silent_at = 1
    builder.stop_rollout_servers("app")
    assert (serve.calls, caplog.text) == (["delete app"], "")


def test_servers_that_are_gone_already_are_not_deleted(serve_that):
    serve = serve_that(0)
    builder.stop_rollout_servers("app")
    assert serve.calls == []


def test_serve_stays_where_another_application_is_on_it(serve_that, monkeypatch):
    ClusterOfNames(monkeypatch)
    serve = serve_that(1, others=("another",))
    actors = Actors(run_spec(name="app"))
    actors.take_away()
    assert serve.calls == ["delete app"]


def test_serve_stays_where_another_run_is_about_to_use_it(serve_that, monkeypatch):
    """known fault: a run that ended while another one began took Serve with it, and the other one
    failed."""
    cluster, serve = ClusterOfNames(monkeypatch), serve_that(1)
    ending, beginning = Actors(run_spec(name="app")), Actors(run_spec(name="app-2"))
    ending.make_recorder(0.0)
    beginning.make_recorder(0.0)
    ending.take_away()
    assert (serve.calls, cluster.names[1:]) == (["delete app"], ["app-2-lease"])
    beginning.take_away()
    assert (serve.calls, cluster.names) == (["delete app", "shutdown"], [])


def test_a_run_that_waits_for_one_of_its_name_begins_once_serve_has_ended(serve_that, monkeypatch):
    """known fault: the lease that it waits for went before Serve, which ended under the new run."""
    cluster, serve = ClusterOfNames(monkeypatch), serve_that(1)
    ending = Actors(run_spec(name="app"))
    ending.make_recorder(0.0)

    def kill(name: str) -> None:
        cluster.names.remove(name)
        if name == "app-lease":
            cluster.names.append(name)
            serve.calls.append("the next run begins")

    monkeypatch.setattr(actors_module.ray, "kill", kill)
    ending.take_away()
    assert serve.calls == ["delete app", "shutdown", "the next run begins"]
    serve.calls.clear()
    builder.end_serve()
    assert serve.calls == [], "it has a lease"


def test_the_last_of_two_runs_that_end_together_ends_serve(serve_that, monkeypatch):
    cluster, serve = ClusterOfNames(monkeypatch), serve_that(1)
    first, second = (Actors(run_spec(name=name)) for name in ("app", "app-2"))
    first.make_recorder(0.0)
    second.make_recorder(0.0)

    def kill(name: str) -> None:
        cluster.names.remove(name)
        if name == "app-lease":  # the other one has looked already, too
            cluster.names.remove("app-2-lease")

    monkeypatch.setattr(actors_module.ray, "kill", kill)
    first.take_away()
    assert serve.calls == ["delete app", "shutdown"]


def test_servers_that_do_not_end_are_told_of_and_serve_stays(serve_that, monkeypatch, caplog):
    monkeypatch.setattr(builder, "_DELETION_S", 0.01)
    serve = serve_that(float("inf"))
    builder.stop_rollout_servers("app")
    assert serve.calls == ["delete app"]
    assert "app could not be deleted: it is there after 0.01 s" in caplog.text
