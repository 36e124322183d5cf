"""Steps of the system's clock (core/clock.py): what lasts is not measured by it."""

from __future__ import annotations

import ast
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

import ray_apr
from ray_apr.serve.vllm.activity import Activity
from ray_apr.train.span import Span

PACKAGE = Path(ray_apr.__file__).parent
ALLOWED = {
    "run/autoscaling.py: time.time_ns": "part of a request's name",
    "core/clock.py: time.time": "read once in a process",
    "run/controller.py: time.time": "begin of the run, as processes that start next read it",
    "run/scale_requests.py: time.time_ns": "part of a file's name",
    "run/options.py: time.time": "name of a run",
    "run/retention.py: time.time": "beside the times of files",
}
"""Where the system's clock is read, and what for."""
WALL_CLOCK = {
    "time.time", "time.time_ns", "time.clock_gettime", "datetime.now", "datetime.utcnow",
    "datetime.today", "date.today",
}  # fmt: skip


def wall_clock_reads(source: str) -> list[str]:
    """Names of the system's clock that a module's source uses, called or not."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module == "time":
            found += [f"time.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            found.append(".".join(ast.unparse(node).split(".")[-2:]))
    return [name for name in found if name in WALL_CLOCK]


def test_the_systems_clock_is_read_where_it_may_be_and_nowhere_else() -> None:
    reads = Counter(
        f"{path.relative_to(PACKAGE).as_posix()}: {name}"
        for path in PACKAGE.rglob("*.py")
        for name in wall_clock_reads(path.read_text())
    )
    assert reads == Counter(list(ALLOWED))


@pytest.mark.parametrize(
    "source",
    ["import time\nx = time.time()", "from time import time", "f(default_factory=time.time)",
     "import datetime\ndatetime.datetime.now()", "time.time_ns()"],
)  # fmt: skip
def test_a_read_of_the_systems_clock_is_seen(source: str) -> None:
    assert wall_clock_reads(source)


@pytest.mark.parametrize("source", ["time.monotonic()", "from time import perf_counter", "a.time"])
def test_other_clocks_are_none_of_its_business(source: str) -> None:
    assert not wall_clock_reads(source)


def test_it_is_unix_time() -> None:
    said = subprocess.run(
        [sys.executable, "-c", "from ray_apr.core.clock import unix_s; print(unix_s())"],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert abs(float(said.stdout) - time.time()) < 30


@pytest.mark.parametrize("step_s", [-3600.0, 3600.0])
def test_a_step_of_the_clock_changes_no_duration(
    monkeypatch: pytest.MonkeyPatch, step_s: float
) -> None:
    activity, real = Activity(), time.time
    activity.start()
    with Span() as span:
        monkeypatch.setattr("time.time", lambda: real() + step_s)
        activity.set_running(1)
    with Span() as later:
        activity.set_running(0)
    assert 0 <= span.duration_s < 60 and span.start_s <= span.end_s
    assert abs(later.start_s - span.end_s) < 60
    spans = activity.drain()
    assert all(0 <= end - start < 60 for _, start, end in spans)
    assert all(0 <= seconds < 60 for seconds in activity.seconds.values())
    assert 0 <= activity.uptime_s < 60
