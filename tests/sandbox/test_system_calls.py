"""Programs that make the calls which the sandbox denies (rewards/system_calls, rewards/jail)."""

from __future__ import annotations

import os

import pytest

from ray_apr.core.exceptions import ResourceError
from ray_apr.rewards.sandbox import Command, SandboxLimits, find_sandbox
from ray_apr.rewards.system_calls import DENIED, MACHINES

machine = MACHINES.get(os.uname().machine)
pytestmark = pytest.mark.skipif(machine is None, reason="no sandbox for this machine")

CALLS = """
import ctypes, errno
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    ctypes.set_errno(0)
    result = libc.syscall(ctypes.c_long(number), *map(ctypes.c_long, arguments))
    return "done" if result != -1 else errno.errorcode[ctypes.get_errno()]
"""
THREADS = """
import subprocess, threading
found = []
thread = threading.Thread(target=found.append, args=(1,))
thread.start(); thread.join()
child = subprocess.run(["/bin/sh", "-c", "(exit 0); exit 4"])
print("calls as ever", found, child.returncode)
"""


def output_of(isolation: str, text: str) -> list[str]:
    """By the Python that runs here or, where only root can read that, by the system's."""
    command = Command.python("program.py", text)
    try:
        sandbox = find_sandbox(isolation)
    except ResourceError:
        command = Command(arguments=("python3", "-I", "program.py"), files={"program.py": text})
        try:
            sandbox = find_sandbox(isolation, needs_python=False)
        except ResourceError as error:
            pytest.skip(str(error))
    outcome = sandbox.run(command, SandboxLimits())
    assert (outcome.ended, outcome.code) == ("exit", 0), outcome
    return outcome.output.decode().splitlines()


@pytest.mark.parametrize("isolation", ["namespaces", "rlimits"])
def test_a_program_makes_no_namespace_no_mount_and_no_kernel_object(isolation):
    """Each call with arguments that the kernel would refuse otherwise than by EPERM, or take."""
    numbers = {name: number[machine.index] for name, number in DENIED.items()}
    clone = {"x86_64": 56, "aarch64": 220}[os.uname().machine]
    text = f"""{CALLS}
for name, number in {numbers}.items():
    print(name, call(number, 0, 0, 0, 0, 0, 0))
print("new user", call({numbers["unshare"]}, 0x10000000))
print("clone", call({clone}, 0x10000000 | 17, 0, 0, 0, 0))
print("clone3", call(435, 0, 0))
{THREADS}"""
    expected = [f"{name} EPERM" for name in numbers]
    expected += ["new user EPERM", "clone EPERM", "clone3 ENOSYS", "calls as ever [1] 4"]
    assert output_of(isolation, text) == expected
