"""What the processes of a run take, by kind, and what its folders hold."""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from ray_apr.run.trained_samples import SAMPLES_FOLDER
from tests.killed_parts import KINDS
from tests.processes import processes_of

_OWN_KINDS = {pattern: kind for kind, pattern in KINDS.items() if pattern}


def kind_of(command: str) -> str:
    """What a process is, from its command line."""
    for pattern, kind in _OWN_KINDS.items():
        if pattern in command:
            return kind
    if command.startswith("ray::"):
        return re.split(r"[\s.:(]", command.removeprefix("ray::"))[0] or "ray"
    if " -m ray_apr train" in command:
        return "driver"
    words = [Path(word).name for word in command.split()]
    script = next((word for word in words[1:3] if word.endswith(".py")), None)
    module = command.partition(" -m ")[2].partition(" ")[0]
    return script or module or (words[0] if words else "")


def folder_bytes(folder: Path) -> int:
    """Size of all files below a folder; those that go meanwhile do not count."""
    total = 0
    for where, _, names in os.walk(folder):  # which leaves out folders that go
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.lstat(os.path.join(where, name)).st_size
    return total


@dataclass(slots=True)
class Watch:
    """Measurements of one run, a row for each process and moment.

    Args:
        mark: Of its processes.
    """

    mark: str
    processes: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """Rows (``s``, ``uss``, ``rss``, ``files``, ``threads``) by ``kind/pid``; bytes."""
    cluster: list[dict[str, Any]] = field(default_factory=list)
    """Bytes of the run folder and of the session's logs, a row a moment."""
    _session: Path | None = None

    def look(self, now_s: float, run_folder: Path) -> None:
        """Measure once.

        Args:
            now_s: The moment, in seconds since the begin.
            run_folder: Of the run.
        """
        for pid, command in processes_of(self.mark).items():
            try:
                row = self._measured(psutil.Process(pid))
            except (psutil.Error, FileNotFoundError, ProcessLookupError):
                continue  # it has ended meanwhile
            name = f"{kind_of(command)}/{pid}"
            self.processes.setdefault(name, []).append({"s": round(now_s, 1), **row})
        rows = sum(path.stat().st_size for path in run_folder.glob("*.jsonl"))
        rows += folder_bytes(run_folder / SAMPLES_FOLDER)
        sizes = {"rows": rows, "checkpoints and journal": folder_bytes(run_folder) - rows}
        if self._session is not None:
            sizes["Ray's logs"] = folder_bytes(self._session / "logs")
        self.cluster.append({"s": round(now_s, 1), **sizes})

    def _measured(self, process: psutil.Process) -> dict[str, int]:
        memory = process.memory_full_info()
        if process.name() == "raylet":
            self._find_session(process.cmdline())
        return {
            "uss": memory.uss,
            "rss": memory.rss,
            "files": process.num_fds(),
            "threads": process.num_threads(),
        }

    def _find_session(self, command: list[str]) -> None:
        text = "\n".join(command)
        session = re.search(r"--session_dir=(\S+)", text) or re.search(r"--session-dir=(\S+)", text)
        self._session = Path(session[1]) if session else None
