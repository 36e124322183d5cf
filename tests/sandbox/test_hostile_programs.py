"""Programs that go for the sandbox itself, or for what no limit of it counts (rewards/jail)."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from ray_apr.core.exceptions import ResourceError
from ray_apr.rewards import jail, sandbox
from ray_apr.rewards.readable import readable_files
from ray_apr.rewards.sandbox import Command, Sandbox, SandboxLimits

ROUTES = ["root_namespaces", "user_namespaces", "rlimits"]


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


@pytest.mark.parametrize("route", ROUTES)
def test_kernel_memory_that_no_limit_counts_is_not_to_be_had(run_by, route):
    """Some of it would outlive the program without namespaces."""
    program = """
        import ctypes, errno, os, socket, struct
        libc = ctypes.CDLL(None, use_errno=True)
        print(libc.semget(0, 1000, 0o600), errno.errorcode[ctypes.get_errno()])
        print(libc.mq_open(b"/apr-test", 0o102, 0o600, None), errno.errorcode[ctypes.get_errno()])
        entries = [(1, 7, -1), *[(2, 7, os.getuid())] * 1000, (4, 7, -1), (16, 7, -1), (32, 7, -1)]
        rights = struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *entry) for entry in entries)
        try:
            os.setxattr("program.py", "system.posix_acl_access", rights)
        except OSError as error:
            print(errno.errorcode[error.errno])
        try:
            socket.socketpair()[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 30)
        except OSError as error:
            print(errno.errorcode[error.errno])
    """
    assert run_by(route, program).output == b"-1 EPERM\n-1 EPERM\nEPERM\nEPERM\n"


@pytest.mark.parametrize("route", ["rlimits"])
def test_folders_however_deep_are_gone(run_by, route):
    before = set(Path("/tmp").glob("ray_apr-sandbox-*"))
    program = """
        import os
        for _ in range(2_000):
            os.mkdir("d")
            os.chdir("d")
        print("ok")
    """
    assert run_by(route, program).output == b"ok\n"
    assert set(Path("/tmp").glob("ray_apr-sandbox-*")) <= before


@pytest.mark.parametrize("route", ROUTES)
def test_standard_streams_can_be_opened_by_name(run_by, route):
    program = """
        text = open("/dev/stdin").read()
        open("/dev/stderr", "w").write("noise")
        open("/dev/stdout", "w").write(f"read {text!r}")
    """
    assert run_by(route, program).output == b"read ''"


def test_sandboxes_of_other_containers_have_other_users(run_by):
    """They cannot see each other's claims, and the kernel counts processes for each user."""
    users = {run_by("root_namespaces", "import os; print(os.getuid())").output for _ in range(3)}
    assert len(users) > 1


def test_a_user_who_runs_something_is_no_user_of_a_sandbox(monkeypatch):
    """Without namespaces all processes of a sandbox's user are ended."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    monkeypatch.setattr(jail, "_UIDS", range(58_998, 59_000))
    with subprocess.Popen(["/bin/sleep", "60"], user=58_999, cwd="/") as other:
        try:
            for _ in range(8):
                uid, claim = jail._claim_user(ends_user=True)
                claim.close()
                assert uid == 58_998
        finally:
            other.kill()
