"""Processes of sandboxes, as /proc shows them."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_JAILER = "rewards/jailer.py"


def sandbox_processes() -> dict[str, str]:
    """Living processes of sandboxes, by process id: jails, and what they started."""
    found = {}
    for folder in filter(lambda folder: folder.name.isdigit(), Path("/proc").iterdir()):
        with contextlib.suppress(OSError):
            command, parent = command_of(folder), folder.parent / parent_of(folder)
            is_jail = _JAILER in command and _JAILER in command_of(parent)
            of_sandbox = ("program.py", "harness.py", "probe.py")
            if is_jail or any(f"{name} " in command for name in of_sandbox):
                found[folder.name] = command
    return found


def jailers() -> list[int]:
    """Process ids of those that this process has started."""
    folders = [folder for folder in Path("/proc").iterdir() if folder.name.isdigit()]
    found = []
    for folder in folders:
        with contextlib.suppress(OSError):
            if _JAILER in command_of(folder) and parent_of(folder) == str(os.getpid()):
                found.append(int(folder.name))
    return found


def is_running(name: str) -> bool:
    """Whether this is in the command line of a living process."""
    found = False
    for folder in filter(lambda folder: folder.name.isdigit(), Path("/proc").iterdir()):
        with contextlib.suppress(OSError):
            found |= name in command_of(folder)
    return found


def command_of(folder: Path) -> str:
    """Command line of a process."""
    return (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()


def parent_of(folder: Path) -> str:
    """Process id of its parent."""
    return (folder / "stat").read_text().rpartition(")")[2].split()[1]
