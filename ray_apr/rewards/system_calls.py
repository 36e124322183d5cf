"""Which system calls a program in the sandbox may not make, as a seccomp filter.

Denied is what makes sockets (but pairs of them, which reach nobody else and which event loops
need), memory that no limit counts, namespaces or mounts, what looks into other processes, and parts
of the kernel that are large and that no answer to a task needs. What is denied fails with EPERM;
`clone3`, whose flags a filter cannot read, with ENOSYS, upon which C libraries call `clone`.

The filter is classic BPF over ``struct seccomp_data`` (include/uapi/linux/{seccomp,bpf_common}.h):
number, architecture, instruction pointer, six arguments.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass

DENIED: Mapping[str, tuple[int, int]] = {
    # sockets but pairs, and memory that no limit counts
    "socket": (41, 198),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "io_setup": (206, 0),
    "setsockopt": (54, 208),  # how much the kernel keeps for a pair of sockets
    "setxattr": (188, 5),  # an access list for each file
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "setxattrat": (463, 463),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    # namespaces and mounts
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "open_tree_attr": (467, 467),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "fanotify_init": (300, 262),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    # other processes
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    # the kernel
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "perf_event_open": (298, 241),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
}
"""Name of a system call, and its numbers on x86_64 and aarch64."""
_CLONE3 = (435, 435)
_CLONE = (56, 220)

NAMESPACE_FLAGS = 0x7E02_0000
"""CLONE_NEWNS, CGROUP, UTS, IPC, USER, PID and NET (include/uapi/linux/sched.h)."""
_X32_BIT = 0x4000_0000
"""Of calls of the x32 ABI, which have numbers of their own."""

ALLOW, EPERM, ENOSYS, KILL = 0x7FFF_0000, 0x0005_0001, 0x0005_0026, 0x8000_0000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16


@dataclass(frozen=True)
class Machine:
    """A kind of processor."""

    index: int
    """Of its numbers in `DENIED`."""
    audit: int
    """Its AUDIT_ARCH (include/uapi/linux/audit.h)."""


MACHINES: Mapping[str, Machine] = {
    "x86_64": Machine(0, 0xC000_003E),
    "aarch64": Machine(1, 0xC000_00B7),
}


def filter_of(machine: Machine) -> bytes:
    """The filter as ``struct sock_filter``, one after the other."""
    denied = [numbers[machine.index] for numbers in DENIED.values()]
    ends = {"allow": ALLOW, "deny": EPERM, "unknown": ENOSYS, "kill": KILL}
    # (operation, operand, where to go if it holds, and if not; None: the next instruction)
    code: list[tuple[int, int, str | None, str | None]] = [
        (_LOAD, _ARCHITECTURE, None, None),
        (_EQUAL, machine.audit, None, "kill"),  # another one numbers its calls otherwise
        (_LOAD, _NUMBER, None, None),
        (_AT_LEAST, _X32_BIT, "deny", None),
        *((_EQUAL, number, "deny", None) for number in denied),
        (_EQUAL, _CLONE3[machine.index], "unknown", None),
        (_EQUAL, _CLONE[machine.index], None, "allow"),
        (_LOAD, _FIRST_ARGUMENT, None, None),  # its low half: flags have 32 bits
        (_ANY_BIT, NAMESPACE_FLAGS, "deny", "allow"),
    ]
    place = {name: len(code) + i for i, name in enumerate(ends)}
    packed = b""
    for i, (operation, operand, *targets) in enumerate(code):
        yes, no = (0 if name is None else place[name] - i - 1 for name in targets)
        packed += struct.pack("HBBI", operation, yes, no, operand)
    return packed + b"".join(struct.pack("HBBI", _RETURN, 0, 0, end) for end in ends.values())
