"""How Ray is started for runs in Python (run/forking.py), without Ray."""

from __future__ import annotations

import contextlib
import os
import socket
from concurrent.futures import Future

import pytest
from ray._private import services

import ray_apr
from ray_apr.compat import ray as ray_compat
from ray_apr.core.exceptions import ConfigError
from ray_apr.run import forking

FORKED = {"py_executable": "forked"}


@pytest.fixture
def started(monkeypatch):
    """Options of each start of Ray, the address of the last one's dashboard, and for which devices
    fork servers were begun."""
    calls, dashboard, devices = [], Future(), []

    def start(**options):
        calls.append(options)
        return dashboard

    @contextlib.contextmanager
    def run(device):
        devices.append(device)
        yield lambda: FORKED

    monkeypatch.setattr(forking, "init_beside_dashboard", start)
    monkeypatch.setattr(forking, "run_fork_servers", run)
    monkeypatch.setattr(forking, "cluster_of_this_machine", lambda: None)
    monkeypatch.setattr(forking, "reach", lambda address: None)
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr("atexit.register", lambda end: None)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv(forking.STATE_TRACKING, "0")
    forking._servers_of_this_process.cache_clear()
    dashboard.set_result("127.0.0.1:8265")
    return calls, devices


def test_workers_of_a_ray_that_starts_here_are_forked_from_the_same_servers_each_time(started):
    calls, devices = started
    assert ray_apr.init(num_cpus=4) == "127.0.0.1:8265"
    ray_apr.init("local", namespace="mine", _system_config={"a": 1})
    defaults = {"address": "local", "log_to_driver": False, "runtime_env": FORKED}
    ahead = {"prestart_worker_first_driver": False}
    assert calls == [
        defaults | {"namespace": "ray_apr", "num_cpus": 4, "_system_config": ahead},
        defaults | {"namespace": "mine", "_system_config": ahead | {"a": 1}},
    ]
    assert devices == ["auto"]
    assert os.environ[forking.STATE_TRACKING] == "0", "what is set stays"
    ray_apr.init(device="cpu")
    assert devices == ["auto", "cpu"]


@pytest.mark.parametrize(
    "how", ["address", "variable", "machine", "runtime_env", "job_config", "runs"]
)
def test_workers_are_not_forked_where_ray_has_been_started_or_is_to_set_them_up(
    started, monkeypatch, how
):
    calls, devices = started
    given, address = {}, "10.0.0.1:6379"
    if how == "address":
        given = {"address": address}
    elif how == "variable":
        monkeypatch.setenv("RAY_ADDRESS", address)
    elif how == "machine":
        monkeypatch.setattr(forking, "cluster_of_this_machine", lambda: address)
    else:
        address = "local"
    if how == "runtime_env":
        given = {"runtime_env": {"pip": ["emoji"]}}
    if how == "job_config":
        given = {"job_config": object()}
    if how == "runs":
        monkeypatch.setattr("ray.is_initialized", lambda: True)
        given = {"ignore_reinit_error": True}
    ray_apr.init(**given)
    assert calls == [{"namespace": "ray_apr", "log_to_driver": False, "address": address} | given]
    assert devices == []


def test_a_cluster_that_has_died_is_told_at_once(started, monkeypatch):
    """known fault: of one that `ray start` had begun, `ray.init` waited for minutes."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    monkeypatch.setattr(forking, "reach", ray_compat.reach)
    monkeypatch.setattr(forking, "cluster_of_this_machine", lambda: address)
    monkeypatch.setattr(services, "find_bootstrap_address", lambda temp_dir: address)
    monkeypatch.setattr(services, "find_gcs_addresses", set)
    for given in ({}, {"address": "auto"}):
        with pytest.raises(ConfigError, match=r"^address = .*no Ray cluster can be joined there"):
            ray_apr.init(**given)
    ray_apr.init("local")
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    ray_apr.init(ignore_reinit_error=True)
    assert [given["address"] for given in started[0]] == ["local", address]


@pytest.mark.parametrize("name", ["num_cpus", "num_gpus"])
def test_a_cluster_that_is_joined_has_its_own_cpus(started, monkeypatch, name):
    """known fault: Ray's error named neither the cluster nor how to start one beside it."""
    monkeypatch.setattr(forking, "cluster_of_this_machine", lambda: "10.0.0.1:6379")
    with pytest.raises(ConfigError, match=rf'^{name} = 4: the cluster at 10.*address="local"'):
        ray_apr.init(**{name: 4})
    ray_apr.init("local", **{name: 4})
    assert len(started[0]) == 1


def test_a_ray_without_its_dashboard_is_one_all_the_same(started, monkeypatch, caplog):
    dashboard = Future()
    dashboard.set_exception(RuntimeError("no port\nleft"))
    monkeypatch.setattr(forking, "init_beside_dashboard", lambda **options: dashboard)
    assert ray_apr.init() is None
    assert "this Ray has no dashboard: no port" in caplog.text
