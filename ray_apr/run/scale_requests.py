"""Requests for another number of engines, and their answers: files of the run folder.

    command (`cli`)                          driver (`run.scaling`)
    scale-<time>-<id>.json ────────────────► takes it, and does or refuses it
    engines.jsonl ◄───────────────────────── a row with the same id

Invariants:
    * A request is taken by the driver or withdrawn by who asks, never both: who removes its file
      has it.
    * A request that an attempt's end cut off is laid back: the next attempt takes it.
    * Who asks learns at once that a run has ended, whatever ended it: nobody holds its folder then.

Pure but for files: no Ray.
"""

from __future__ import annotations

import contextlib
import json
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from ray_apr.core.exceptions import APRError, ConfigError, StarvedError
from ray_apr.run.folder import add_row, is_held, put_text, read_rows

ENGINES_FILE = "engines.jsonl"
"""File of the run folder with a row for each request that was answered."""
_PATTERN = "scale-*.json"
_LOOK_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleRequest:
    """What a run is asked for."""

    request_id: str
    replicas: Any
    """Number of engines, as it was written by whoever asks: not checked yet."""
    by: Literal["command", "autoscaling"] = "command"
    """Who asks."""
    why: str = ""
    """What it is asked for, if that is told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleAnswer:
    """What became of a request; a row of ``engines.jsonl``."""

    request_id: str
    outcome: Literal["done", "refused", "undone"]
    """An undone one was begun, and failed; there are as many engines as before."""
    at: float
    """Unix time of the answer."""
    time_s: float
    """The same in seconds since the run began, as in the other files of the run folder."""
    before: int
    """Engines when the request came."""
    after: int
    """Engines now."""
    seconds: float
    """From its begin to the answer."""
    reason: str = ""
    """Why it was not done."""
    by: Literal["command", "autoscaling"] = "command"
    """Who asked."""
    why: str = ""
    """What it was asked for, if that was told."""


def check_replicas(replicas: Any) -> int:
    """The number of engines that is asked for.

    Raises:
        ConfigError: If it is none.
    """
    if isinstance(replicas, bool) or not isinstance(replicas, int) or replicas < 1:
        raise ConfigError("replicas", replicas, "give a whole number, at least 1")
    return replicas


def scale(folder: Path, replicas: int, *, timeout_s: float) -> ScaleAnswer:
    """Ask a run for another number of engines, and wait for its answer.

    Waits for: that. Unblocked by: the answer, the end of the process that trains, or `timeout_s`.

    Args:
        folder: Of a run that a process trains.
        replicas: Engines that it is to have.
        timeout_s: Limit of the wait.

    Raises:
        ConfigError: If the number is none, or no process trains the run.
        APRError: If the run ends before it answers.
        StarvedError: If it does not answer in time.
    """
    check_replicas(replicas)
    if not is_held(folder):
        raise ConfigError("RUN_DIR", str(folder), "no process trains a run there now")
    request_id = ask(folder, replicas)
    deadline = time.monotonic() + timeout_s
    try:
        while True:
            is_there = is_held(folder)  # before the look, which the last answer comes before
            for row in read_rows(folder / ENGINES_FILE):
                if row["request_id"] == request_id:
                    return ScaleAnswer(**row)
            if not is_there:
                raise APRError(f"the run in {folder} has ended; its engines are gone with it")
            if time.monotonic() > deadline:
                break
            time.sleep(_LOOK_S)
    finally:
        is_withdrawn = withdraw(folder, request_id)
    what = "it is withdrawn" if is_withdrawn else f"the run is at it; see {ENGINES_FILE}"
    raise StarvedError(f"the run in {folder} did not answer within {timeout_s:g} s: {what}")


def ask(folder: Path, replicas: Any) -> str:
    """Ask a run for a number of engines; returns the request's id."""
    request_id = f"{time.time_ns()}-{uuid.uuid4().hex[:8]}"
    lay(folder, ScaleRequest(request_id=request_id, replicas=replicas))
    return request_id


def withdraw(folder: Path, request_id: str) -> bool:
    """Take a request back; whether nobody had taken it."""
    try:
        _path(folder, request_id).unlink()
    except FileNotFoundError:
        return False
    return True


def take(folder: Path) -> ScaleRequest | None:
    """Take the oldest request of a run folder, if there is one."""
    for path in sorted(folder.glob(_PATTERN)):
        request_id = path.stem.removeprefix("scale-")
        with contextlib.suppress(FileNotFoundError):  # withdrawn
            text = path.read_text(encoding="utf-8")
            if withdraw(folder, request_id):
                return ScaleRequest(request_id=request_id, replicas=_replicas(text))
    return None


def lay(folder: Path, request: ScaleRequest) -> None:
    """Lay a request into a run folder, whole at once."""
    text = json.dumps({"replicas": request.replicas}) + "\n"
    put_text(_path(folder, request.request_id), text)


def forget(folder: Path) -> None:
    """Remove requests that nobody waits for: of commands that were killed, before a run began."""
    while take(folder) is not None:
        continue


def answer(folder: Path, given: ScaleAnswer) -> None:
    """Write what became of a request."""
    add_row(folder / ENGINES_FILE, asdict(given))


def last_number(folder: Path, since: float) -> int | None:
    """Engines after the last request that was done since a Unix time; None without one."""
    done = [
        r for r in read_rows(folder / ENGINES_FILE) if r["outcome"] == "done" and r["at"] >= since
    ]
    return int(done[-1]["after"]) if done else None


def is_ordered(folder: Path, since: float) -> bool:
    """Whether a number of engines was had by command since a Unix time."""
    rows = read_rows(folder / ENGINES_FILE)
    return any(
        row["outcome"] == "done" and row.get("by", "command") == "command" and row["at"] >= since
        for row in rows
    )


def _path(folder: Path, request_id: str) -> Path:
    return folder / f"scale-{request_id}.json"


def _replicas(text: str) -> Any:
    try:
        asked = json.loads(text)
    except ValueError:
        return text
    return asked.get("replicas") if isinstance(asked, dict) else asked
