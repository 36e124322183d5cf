"""Find the processes that a test started, wherever they ended up in the process tree."""

from __future__ import annotations

import os
import signal
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MARK = "RAY_APR_TEST_MARK"


def marked_environment() -> tuple[str, dict[str, str]]:
    """An environment whose mark every process started with it inherits; returns (mark, env)."""
    mark = uuid.uuid4().hex
    return mark, {**os.environ, MARK: mark, "PYTHONUNBUFFERED": "1"}


def processes_of(mark: str) -> dict[int, str]:
    """Living processes with this mark, and those below them, some of which lose their environment
    with their new title: pid -> command line. Zombies do not count."""
    commands, children = all_processes()
    needle = f"{MARK}={mark}".encode()
    return _with_those_below([pid for pid in commands if _has(pid, needle)], commands, children)


def processes_below(pid: int) -> dict[int, str]:
    """Living processes that a process has started, and those below them: pid -> command line."""
    commands, children = all_processes()
    return _with_those_below(children.get(pid, []), commands, children)


def all_processes() -> tuple[dict[int, str], dict[int, list[int]]]:
    """Command line and children of every other process."""
    commands: dict[int, str] = {}
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        pid = int(folder.name)
        try:
            parent = int((folder / "stat").read_bytes().rpartition(b")")[2].split()[1])
            children.setdefault(parent, []).append(pid)
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ")
            commands[pid] = command.decode(errors="replace")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # it has ended meanwhile, or is not ours
    return commands, children


def _has(pid: int, variable: bytes) -> bool:
    """Whether a process has a variable in its environment."""
    try:
        return variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return False


def _with_those_below(
    reached: list[int], commands: dict[int, str], children: dict[int, list[int]]
) -> dict[int, str]:
    reached = list(reached)
    found: dict[int, str] = {}
    while reached:
        pid = reached.pop()
        if pid not in found:
            found[pid] = commands.get(pid, "")[:200]
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


@contextmanager
def marked_processes() -> Iterator[tuple[str, dict[str, str]]]:
    """(mark, environment); it is an error if a process with the mark outlives the block."""
    mark, env = marked_environment()
    try:
        yield mark, env
        left = wait_until_none(mark, 30)
        assert not left, f"processes left behind: {left}"
    finally:
        kill_all(mark)
