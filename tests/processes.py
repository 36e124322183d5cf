"""Find the processes that a test started, wherever they ended up in the process tree."""

from __future__ import annotations

import os
import signal
import time
import uuid
from pathlib import Path

MARK = "RAY_APR_TEST_MARK"


def marked_environment() -> tuple[str, dict[str, str]]:
    """An environment whose mark every process started with it inherits; returns (mark, env)."""
    mark = uuid.uuid4().hex
    return mark, {**os.environ, MARK: mark, "PYTHONUNBUFFERED": "1"}


def processes_of(mark: str) -> dict[int, str]:
    """Living processes with this mark, and those below them, some of which lose their environment
    with their new title: pid -> command line. Zombies do not count."""
    commands: dict[int, str] = {}
    children: dict[int, list[int]] = {}
    reached: list[int] = []
    needle = f"{MARK}={mark}".encode()
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        pid = int(folder.name)
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(pid)
            commands[pid] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:200]
            if needle in (folder / "environ").read_bytes().split(b"\0"):
                reached.append(pid)
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # it has ended meanwhile, or is not ours
    found: dict[int, str] = {}
    while reached:
        pid = reached.pop()
        if pid not in found:
            found[pid] = commands.get(pid, "")
            reached += children.get(pid, [])
    return {pid: command for pid, command in found.items() if command.strip()}


def wait_until_none(mark: str, timeout_s: float) -> dict[int, str]:
    """Wait until no process with this mark is left; returns those that are."""
    deadline = time.monotonic() + timeout_s
    while (left := processes_of(mark)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left


def kill_all(mark: str) -> None:
    """Kill what a failed test left, so that it does not disturb the next one."""
    for pid in processes_of(mark):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
