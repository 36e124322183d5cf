"""What the parts of a run print, functions of the user's among them: for the terminal and a file.

Ray has it in logs of its session, on the node of each process, and brings it to the driver.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from ray_apr.compat.ray import workers_lines_go_to

_kept = logging.getLogger("ray.parts")
"""Below a warning it is for `ray.log`, as all that Ray says."""
_SHOWN = {
    "RewardWorker": "reward worker",
    "RolloutWorker": "rollout worker",
    "Evaluator": "evaluator",
    "SampleBuffer": "buffer",
    "RunRecorder": "recorder",
    "RayTrainWorker": "train worker",
}
"""Class of an actor in which the user's code or ours speaks -> what it is called."""
_RAYS = re.compile(r"(DEBUG|INFO|WARNING|ERROR) \d{4}-|\[\d{4}-|[IWEF]\d{4} ")
"""Begins of lines of Serve, of Ray's core and of gRPC."""
_MOST, _EACH_S = 20, 10.0
"""Lines of one kind of part that the terminal has in so many seconds."""


def hear_parts(
    tell: Callable[[str], None] | None, file: Path | None
) -> AbstractContextManager[None]:
    """Have a driver that connects in this block, with `log_to_driver`, tell what processes of its
    job print.

    `ray.log` has all of it, with what engines and Ray's own actors print. The terminal has the
    lines of parts that call functions of the user's or that warn, but not Ray's among them: of
    train workers what is on stdout, as Ray Train tells of itself on stderr, together with what
    their code prints.

    Args:
        tell: Gets lines for the terminal; None: there it has all, as the logger "ray" does.
        file: Which has all of them.
    """
    return workers_lines_go_to(_Lines(tell, file).take)


class _Lines:
    def __init__(self, tell: Callable[[str], None] | None, file: Path | None) -> None:
        self._tell = tell
        self._file = file
        self._windows: dict[str, tuple[float, int]] = {}
        """By kind of part: when its window began, and the lines since then."""

    def take(self, printed: Mapping[str, Any]) -> None:
        """Take some lines of one process.

        Args:
            printed: Of Ray: `lines`, `is_err`, `pid`, `ip`, the driver's as `localhost`, and what
                runs there as `actor_name` or `task_name`.
        """
        if printed["pid"] == "autoscaler":  # its table of the cluster, every five seconds
            return
        name = printed.get("actor_name") or printed.get("task_name") or "process"
        where = "" if printed.get("ip") == printed.get("localhost") else f", {printed.get('ip')}"
        part = _SHOWN.get(name, "")
        if name == "RayTrainWorker" and printed["is_err"]:
            part = ""
        for line in printed["lines"]:
            _kept.info("(%s %s%s) %s", name, printed["pid"], where, line)
            if part and self._tell is not None and not _RAYS.match(line):
                self._show(self._tell, part, f"{part}{where}: {line}")

    def _show(self, tell: Callable[[str], None], part: str, text: str) -> None:
        now = time.monotonic()
        began_at, num_lines = self._windows.get(part, (now, 0))
        if now - began_at > _EACH_S:
            began_at, num_lines = now, 0
        self._windows[part] = began_at, num_lines + 1
        if num_lines < _MOST:
            tell(text)
        elif num_lines == _MOST:
            tell(f"{part}: more lines of the next {_EACH_S:.0f} s are in {self._file} alone")
