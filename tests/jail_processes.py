"""Processes of sandboxes."""

from __future__ import annotations

import os

from tests.processes import all_processes

_JAILER = "rewards/jailer.py"
_PROGRAMS = ("program.py", "harness.py", "probe.py")


def sandbox_processes() -> dict[int, str]:
    """Living processes of sandboxes, by process id: jails, and what they started."""
    commands, children = all_processes()
    jails = {
        child
        for pid, found in children.items()
        if _JAILER in commands.get(pid, "")
        for child in found
    }
    return {
        pid: command
        for pid, command in commands.items()
        if (pid in jails and _JAILER in command) or any(f"{name} " in command for name in _PROGRAMS)
    }


def jailers() -> list[int]:
    """Process ids of those that this process has started."""
    commands, children = all_processes()
    return [pid for pid in children.get(os.getpid(), []) if _JAILER in commands.get(pid, "")]


def is_running(name: str) -> bool:
    """Whether this is in the command line of a living process."""
    return any(name in command for command in all_processes()[0].values())
