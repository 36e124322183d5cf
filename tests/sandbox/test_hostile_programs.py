"""Programs that go for the sandbox itself, or for what no limit of it counts (rewards/jail)."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from ray_apr.core.exceptions import ResourceError
from ray_apr.rewards import sandbox
from ray_apr.rewards.readable import readable_files
from ray_apr.rewards.sandbox import Command, Sandbox, SandboxLimits

@pytest.fixture
def run_by(monkeypatch):
    """Run a program by one route and the system's Python: only root may see the other one."""
    python = "/usr/bin/python3"
    if not Path(python).exists():
        pytest.skip("there is no system Python")
    for name, value in (("executable", python), ("prefix", "/usr"), ("base_prefix", "/usr")):
        monkeypatch.setattr(sys, name, value)
    monkeypatch.setattr(sandbox, "readable_files", readable_files.__wrapped__)

    def run(route: str, program: str, **limits):
        if os.geteuid() != 0 and route != "user_namespaces":
            pytest.skip("needs root")
        command = Command.python("program.py", "")
        try:
            Sandbox(route=route).run(command, SandboxLimits())
        except ResourceError as error:
            pytest.skip(str(error))
        command = Command.python("program.py", textwrap.dedent(program))
        return Sandbox(route=route).run(command, SandboxLimits(**limits))

    return run


@pytest.mark.parametrize("route", ["root_namespaces", "user_namespaces"])
def test_no_signal_ends_the_jail(run_by, route):
    """Else the program would be an error, and no wrong answer."""
    program = """
        import os
        for number in range(1, 65):
            try:
                os.kill(1, number)
            except OSError:
                pass
        print("ok")
    """
    outcome = run_by(route, program)
    assert (outcome.ended, outcome.code, outcome.output) == ("exit", 0, b"ok\n")
