"""Find the processes that a test started, wherever they ended up in the process tree."""

from __future__ import annotations

import contextlib
import os
import signal
import time
import uuid
from pathlib import Path

import psutil

MARK = "RAY_APR_TEST_MARK"


def marked_environment() -> tuple[str, dict[str, str]]:
    """An environment whose mark every process started with it inherits; returns (mark, env)."""
    mark = uuid.uuid4().hex
    return mark, {**os.environ, MARK: mark, "PYTHONUNBUFFERED": "1"}


def processes_of(mark: str) -> dict[int, str]:
    """Living processes with this mark: pid -> command line. Zombies do not count."""
    found: dict[int, str] = {}
    needle = f"{MARK}={mark}".encode()
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        try:
            if needle in (folder / "environ").read_bytes().split(b"\0"):
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                if command.strip():
                    found[int(folder.name)] = command[:200]
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # it has ended meanwhile, or is not ours
    return found


def wait_until_none(mark: str, timeout_s: float) -> dict[int, str]:
    """Wait until no process with this mark is left; returns those that are."""
    deadline = time.monotonic() + timeout_s
    while (left := processes_of(mark)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left


def kill_all(mark: str) -> None:
    """Kill what a test left, so that it does not disturb the next one: also the children of marked
    processes, some of which lose their environment with their new title."""
    pids = set(processes_of(mark))
    for pid in tuple(pids):
        with contextlib.suppress(psutil.Error):
            pids |= {child.pid for child in psutil.Process(pid).children(recursive=True)}
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
