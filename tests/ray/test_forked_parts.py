"""A run whose parts are forked from processes that have imported what they need."""

from __future__ import annotations

import socket
import subprocess
import sys

import psutil
import pytest

from ray_apr.compat.forked.server import FIRST_VARIABLE
from ray_apr.tools.verify import verify
from tests.killed_parts import SMALL, KilledRun
from tests.processes import processes_of
from tests.whole_runs import ONE_OF_EACH

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(420)]

_SCRIPT = """
import os, socket, sys
import ray, ray_apr

@ray.remote
class Worker:
    def seen(self):
        return os.environ.get("RAY_APR_IS_FORKED"), "torch" in sys.modules, os.environ["MINE"]

os.environ["MINE"] = "set before"
address = ray_apr.init(num_cpus=1)
print(*ray.get(Worker.remote().seen.remote()))
socket.create_connection(address.split(":"), 30).close()
ray.shutdown()
os.environ["MINE"] = "changed"
ray_apr.init(num_cpus=1, include_dashboard=False)
print(*ray.get(Worker.remote().seen.remote()))
ray.shutdown()
ray.init(num_cpus=1, include_dashboard=False)
print(*ray.get(Worker.remote().seen.remote()))
"""
_FORKED = ("replica", "engine core", "train worker", "rollout worker", "buffer", "recorder")


def test_parts_are_forked_and_begin_again_once_their_servers_are_dead(tmp_path, marked):
    mark, env = marked
    run = KilledRun(tmp_path, mark, env, (*SMALL, *ONE_OF_EACH, "train.steps=24"))
    run.start()
    run.wait_for_step(1)
    (said,) = (line for line in run.said if line.startswith("dashboard: "))
    address = said.removeprefix("dashboard: http://").strip().split(":")
    socket.create_connection((address[0], int(address[1])), 30).close()
    for kind in _FORKED:
        assert run.pids(kind), kind
        for pid in run.pids(kind):
            assert psutil.Process(pid).environ().get(FIRST_VARIABLE) == "1", kind
    for pid, name in processes_of(mark).items():
        if "ray::IDLE" in name:  # Ray began none that nobody had asked for
            assert psutil.Process(pid).environ().get(FIRST_VARIABLE) == "1", name
    assert run.kill_all("fork server")
    first = run.pids("rollout worker")
    assert run.kill_all("rollout worker")
    run.wait_for_step(len(run.times) + 8)
    (pid,) = run.pids("rollout worker")
    assert pid not in first
    assert FIRST_VARIABLE not in psutil.Process(pid).environ()
    assert run.end(300) == 0, run.tail
    checks = verify(tmp_path / "run")
    assert all(check.ok for check in checks), checks


def test_workers_of_a_script_are_forked_where_it_asks_for_it(tmp_path, marked):
    _, env = marked
    ended = subprocess.run(
        [sys.executable, "-c", _SCRIPT], env=env, cwd=tmp_path, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == [
        "1 True set before", "1 True changed", "None False changed",
    ]  # fmt: skip
