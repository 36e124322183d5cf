"""The seccomp filter of the sandbox, run by an interpreter of its own (rewards/system_calls.py)."""

from __future__ import annotations

import struct

import pytest

from ray_apr.rewards.system_calls import (
    ALLOW,
    DENIED,
    ENOSYS,
    EPERM,
    KILL,
    MACHINES,
    Machine,
    filter_of,
)

CLONE_VM, CLONE_THREAD = 0x100, 0x10000
NAMESPACES = {
    "NEWNS": 0x20000, "NEWCGROUP": 0x2000000, "NEWUTS": 0x4000000, "NEWIPC": 0x8000000,
    "NEWUSER": 0x10000000, "NEWPID": 0x20000000, "NEWNET": 0x40000000,
}  # fmt: skip
CLONE = {"x86_64": 56, "aarch64": 220}
ORDINARY = {"x86_64": (0, 1, 9, 57, 58, 59, 231), "aarch64": (63, 64, 222, 221, 93)}
"""read, write, mmap, fork, vfork, execve, exit_group."""


def answer(machine: Machine, number: int, argument: int = 0, audit: int | None = None) -> int:
    """What the kernel does for a call: classic BPF (include/uapi/linux/bpf_common.h)."""
    code = list(struct.iter_unpack("HBBI", filter_of(machine)))
    arch = machine.audit if audit is None else audit
    data = struct.pack("IIQ6Q", number, arch, 0, argument, *[0] * 5)
    place, held = 0, 0
    for _ in range(len(code)):
        operation, yes, no, operand = code[place]
        place += 1
        if operation == 0x20:
            held = struct.unpack_from("I", data, operand)[0]
        elif operation == 0x06:
            return operand
        else:
            holds = {0x15: held == operand, 0x35: held >= operand, 0x45: bool(held & operand)}
            place += yes if holds[operation] else no
    raise AssertionError("no end")


@pytest.mark.parametrize("name", MACHINES)
def test_each_call_that_is_named_is_denied_and_others_are_not(name):
    machine = MACHINES[name]
    for number in DENIED.values():
        assert answer(machine, number[machine.index]) == EPERM
    for number in ORDINARY[name]:
        assert answer(machine, number) == ALLOW


@pytest.mark.parametrize("name", MACHINES)
def test_clone_makes_threads_and_processes_but_no_namespace(name):
    machine = MACHINES[name]
    for flags in (17, CLONE_VM | CLONE_THREAD, 0x7_0000_0000 | 17):
        assert answer(machine, CLONE[name], flags) == ALLOW
    for flag in NAMESPACES.values():
        assert answer(machine, CLONE[name], flag | 17) == EPERM
    assert answer(machine, 435) == ENOSYS, "clone3 takes its flags from memory"


def test_other_ways_to_number_calls_are_no_way_around():
    machine = MACHINES["x86_64"]
    assert answer(machine, 0, audit=0x4000_0003) == KILL, "32 bits"
    assert answer(machine, 0x4000_0000) == EPERM, "x32"
