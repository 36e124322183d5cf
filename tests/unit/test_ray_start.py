"""How a node of Ray starts beside its dashboard (compat/ray.py), without one."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import ray._private.node
import ray._private.services

from ray_apr.compat.ray import init_beside_dashboard

_LIMIT_S = 10.0


class Node:
    """What is used of Ray's."""

    def __init__(self) -> None:
        self.webui_url = ""
        self.is_asked = threading.Event()
        self.error: Exception | None = None
        self.options: dict[str, Any] = {}

    def start_api_server(self, **options: Any) -> None:
        """Wait until the test asks."""
        assert self.is_asked.wait(_LIMIT_S)
        self.options = options
        if self.error is not None:
            raise self.error
        self.webui_url = "127.0.0.1:8265"


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> list[Node]:
    """Those that `ray.init` makes here."""
    made: list[Node] = []

    def init(address: str) -> SimpleNamespace:
        if address == "local":
            node = ray._private.node.Node()
            made.append(node)
            node.start_api_server(include_dashboard=True, raise_on_failure=True)
        return SimpleNamespace(dashboard_url="10.0.0.1:8265" if address == "auto" else "")

    monkeypatch.setattr(ray._private.node, "Node", Node)
    monkeypatch.setattr(ray, "init", init)
    return made


def test_ray_starts_while_its_dashboard_does(nodes: list[Node]) -> None:
    dashboard = init_beside_dashboard(address="local")
    assert not dashboard.done()
    nodes[0].is_asked.set()
    assert dashboard.result(_LIMIT_S) == "127.0.0.1:8265"
    assert nodes[0].options == {"include_dashboard": True, "raise_on_failure": True}
    assert ray._private.node.Node is Node


def test_a_dashboard_that_does_not_start_is_an_error_of_its_own(nodes: list[Node]) -> None:
    dashboard = init_beside_dashboard(address="local")
    nodes[0].error = OSError("no port")
    nodes[0].is_asked.set()
    with pytest.raises(OSError, match="no port"):
        dashboard.result(_LIMIT_S)


@pytest.mark.parametrize(("address", "where"), [("auto", "10.0.0.1:8265"), ("other", None)])
def test_a_cluster_that_is_joined_has_its_dashboard(
    nodes: list[Node], address: str, where: str | None
) -> None:
    assert init_beside_dashboard(address=address).result(timeout=0) == where
    assert nodes == []


@pytest.mark.parametrize(
    ("has_token", "mode", "is_told"),
    [(True, None, True), (False, None, False), (True, "disabled", False)],
)
def test_a_cluster_that_may_ask_for_a_token_is_not_joined_without_a_word_of_it(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    has_token: bool,
    mode: str | None,
    is_told: bool,
) -> None:
    """known fault: after a run of its own a cluster of `ray start` could not be joined, and the
    error did not say why."""

    def init(address: str) -> None:
        raise ConnectionError(f"Failed to connect to Ray cluster at {address}")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    if mode is not None:
        monkeypatch.setenv("RAY_AUTH_MODE", mode)
    if has_token:
        (tmp_path / ".ray").mkdir()
        (tmp_path / ".ray" / "auth_token").write_text("abc")
    with pytest.raises(ConnectionError, match=r"^Failed to connect to .* at auto") as caught:
        init_beside_dashboard(address="auto")
    assert ("set RAY_AUTH_MODE=token" in str(caught.value)) == is_told


def test_a_token_is_not_told_as_what_is_wrong_where_no_cluster_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """known fault: after a run of its own `ray.address: auto` without any cluster told of it."""
    from ray._private import services

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("abc")
    monkeypatch.setattr(services, "find_gcs_addresses", set)
    monkeypatch.setattr(services, "find_bootstrap_address", lambda temp_dir: None)
    find = services.canonicalize_bootstrap_address_or_die
    monkeypatch.setattr(ray, "init", lambda **options: find(options["address"]))
    with pytest.raises(ConnectionError, match="Could not find any running Ray") as caught:
        init_beside_dashboard(address="auto")
    assert "token" not in str(caught.value)


def test_processes_of_the_node_are_not_in_the_group_of_this_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A signal to the whole group is for the driver, which ends Ray."""
    groups: list[tuple[int, int]] = []
    popen = ray._private.services.ConsolePopen

    def init(address: str) -> SimpleNamespace:
        with ray._private.services.ConsolePopen(["sleep", "60"]) as process:
            groups.append((process.pid, os.getpgid(process.pid)))
            process.kill()
        return SimpleNamespace(dashboard_url="")

    monkeypatch.setattr(ray, "init", init)
    init_beside_dashboard(address="local")
    ((pid, group),) = groups
    assert group == pid != os.getpgrp()
    assert ray._private.services.ConsolePopen is popen
