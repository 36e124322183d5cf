"""Runs that lose an engine core to kill -9, at any moment or in the midst of a weight sync.

Where syncs overlap, the trainer's span "sync" is the gather: it is on disk the moment that the
weights leave. The span of the actor "weights" is the whole sync. By the first one a kill is aimed,
by the other one it is judged afterwards.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.processes import processes_of
from tests.whole_runs import start_run

STEPS = 8
SMALL = (
    f"train.steps={STEPS}", "train.batch_size=32", "rollout.group_size=4",
    "rollout.max_response_tokens=96", "scaling={num_workers: 1, use_gpu: false}",
)  # fmt: skip
"""The arithmetic example with two engines and a sync after each step, in few and short steps."""
LIMIT_S = 420.0
_POLL_S = 0.002


class Timeline:
    """Spans of a run, as they come to its disk."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "timeline.jsonl"
        self._offset = 0

    def new_spans(self) -> list[dict[str, Any]]:
        """Those since the last call."""
        if not self._path.exists():
            return []
        with self._path.open() as file:
            file.seek(self._offset)
            text = file.read()
        whole = text[: text.rfind("\n") + 1]
        self._offset += len(whole.encode())
        return [json.loads(line) for line in whole.splitlines()]

    def gathers(self) -> Iterator[tuple[dict[str, Any], float]]:
        """The trainer's gathers as they come, each with the Unix time of its arrival.

        Raises:
            TimeoutError: If none comes for too long.
        """
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            for span in self.new_spans():
                if (span["actor"], span["what"]) == ("trainer", "sync"):
                    deadline = time.monotonic() + LIMIT_S
                    yield span, time.time()
            time.sleep(_POLL_S)
        raise TimeoutError(f"no weight sync within {LIMIT_S:g} s")


@dataclass(frozen=True, kw_only=True)
class Kill:
    """One kill."""

    after_step: int
    """Of the steps, from 1, during or after whose sync it comes."""
    delay_s: float
    killed_s: float
    """Seconds since the run began."""


def engine_cores(mark: str, num: int) -> list[int]:
    """Process ids of the cores, once there are so many.

    Raises:
        TimeoutError: If they do not start.
    """
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        pids = [pid for pid, name in processes_of(mark).items() if "EngineCore" in name]
        if len(pids) == num:
            return pids
        time.sleep(0.5)
    raise TimeoutError(f"{num} engine cores did not start within {LIMIT_S:g} s")


def kill_a_core(
    mark: str, folder: Path, *, after_step: int, delay_s: float, num_engines: int = 2
) -> Kill:
    """Wait until the sync after a step begins, and longer; then kill -9 one engine core."""
    pids = engine_cores(mark, num_engines)  # now: it takes longer than there is time to aim
    gathers = Timeline(folder).gathers()
    span, arrived = next(itertools.islice(gathers, after_step - 1, None))
    time.sleep(max(0.0, arrived + delay_s - time.time()))
    killed_s = span["end_s"] + time.time() - arrived
    os.kill(random.choice(pids), signal.SIGKILL)
    return Kill(after_step=after_step, delay_s=delay_s, killed_s=killed_s)


def sync_of(kill: Kill, folder: Path) -> dict[str, Any] | None:
    """The sync that a kill fell into."""
    for span in Timeline(folder).new_spans():
        is_sync = (span["actor"], span["what"]) == ("weights", "sync")
        if is_sync and span["start_s"] <= kill.killed_s <= span["end_s"]:
            return span
    return None


def run_and_kill(
    mark: str, env: dict[str, str], folder: Path, *, after_step: int, delay_s: float
) -> dict[str, Any]:
    """Do a run of `SMALL` and kill one of its two engine cores; what became of it."""
    began = time.monotonic()
    log = folder / "log.txt"
    process = start_run(folder, env, *SMALL, log=log)
    try:
        kill = kill_a_core(mark, folder / "run", after_step=after_step, delay_s=delay_s)
        code = process.wait(timeout=LIMIT_S)
    except (TimeoutError, subprocess.TimeoutExpired):
        process.kill()
        return {"ok": False, "after_step": after_step, "error": "it hangs", "log": _tail(log)}
    final = json.loads((folder / "run" / "final.json").read_text())
    hit = sync_of(kill, folder / "run")
    steps = len((folder / "run" / "metrics.jsonl").read_text().splitlines())
    text = log.read_text()
    ok = (code, final["ledger_error"], final["status"], steps) == (0, 0, "ok", STEPS)
    return {
        "ok": ok,
        "after_step": kill.after_step,
        "delay_s": round(kill.delay_s, 4),
        "killed_s": round(kill.killed_s, 3),
        "in_sync": hit is not None,
        "sync_s": None if hit is None else round(hit["end_s"] - hit["start_s"], 3),
        "exit_code": code,
        "ledger_error": final["ledger_error"],
        "steps": steps,
        "num_engines_seen": len(final["engines"]),
        "wall_s": round(time.monotonic() - began, 1),
        **({} if ok else {"error": final["error"], "log": text[-6000:]}),
    }


def _tail(log: Path) -> str:
    return log.read_text()[-6000:]
