"""What the actors of a run and Ray's control store grow by while it trains, how much of that the C
library holds free, and what CPU time they take.

    python benchmarks/actor_memory.py --arenas default 1 \\
        --out benchmarks/results/actor-memory-2cpu.json

A run with engines that draw their tokens by chance (tests/scripted_backend.py) takes several steps
a second and evaluates its held-out prompts without a pause, so that minutes of it make the calls of
hours of another run. Each number of arenas is a run of its own, whose processes all have it as
MALLOC_ARENA_MAX; "default" leaves that to the run. Growth and CPU time are those of the second
half; `heaps` is what of a process's memory belongs to the C library's arenas. Of `gcs_server`,
which has an allocator of its own, `heaps` says nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))

from host import describe_call, package_versions

from ray_apr.run.folder import read_rows
from tests.growth import growth
from tests.killed_parts import KilledRun
from tests.processes import kill_all, marked_environment, processes_of, wait_until_none
from tests.scripted_runs import SCRIPTED
from tests.watched_processes import kind_of

PARTS = ("evaluator", "recorder", "buffer", "rollout worker", "gcs_server")
HELD_OUT = Path(__file__).parents[1] / "examples/arithmetic/held_out.parquet"
SETTINGS = (*SCRIPTED, "train.steps=1000000", "train.checkpoint_every=1000", "ray.num_cpus=8")
EVALUATION = "every: 1, at_start: false, max_inflight: 16"
_LOOK_EVERY_S = 6.0
_ARENA_BYTES = 64 << 20
"""What each thread's arena lies at a multiple of."""
_LIMIT_S = 120.0


def memory_of(pid: int) -> dict[str, float]:
    """MB of a process that are its own, and of those the ones in the C library's arenas."""
    kib = dict.fromkeys(("uss", "heaps"), 0)
    is_arena = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        first, *words = line.split()
        if not first.endswith(":"):  # where an area lies, and what it is
            begin = int(first.partition("-")[0], 16)
            is_arena = words[4:] == ["[heap]"] or (len(words) == 4 and begin % _ARENA_BYTES == 0)
        elif first in ("Private_Clean:", "Private_Dirty:"):
            kib["uss"] += int(words[0])
            kib["heaps"] += int(words[0]) * is_arena
    return {name: round(value * 1024 / 1e6, 2) for name, value in kib.items()}


def look(mark: str) -> dict[str, dict[str, float]]:
    """MB of each part of a run, and CPU seconds."""
    found = {}
    for pid, command in processes_of(mark).items():
        kind = kind_of(command)
        if kind in PARTS:
            times = psutil.Process(pid).cpu_times()
            found[kind] = memory_of(pid) | {"cpu_s": round(times.user + times.system, 2)}
    return found


def one_run(minutes: float, arenas: str) -> dict[str, Any]:
    """Do one run with so many arenas; what its parts grew by."""
    mark, env = marked_environment()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="memory-", ignore_cleanup_errors=True) as name:
        env["RAY_TMPDIR"] = name
        if arenas != "default":
            env["MALLOC_ARENA_MAX"] = arenas
        evaluation = f"evaluation={{prompts: {HELD_OUT}, {EVALUATION}}}"
        run = KilledRun(Path(name), mark, env, (*SETTINGS, evaluation))
        try:
            began = time.monotonic()
            run.start()
            run.wait_for_step(2)
            started_s = round(time.monotonic() - began, 1)
            began = time.monotonic()
            while (now := time.monotonic() - began) < 60 * minutes:
                rows.append({"s": round(now, 1), "steps": len(run.times), **look(mark)})
                time.sleep(_LOOK_EVERY_S)
            steps = len(run.times)
            evaluations = len(read_rows(Path(name) / "run/evaluations.jsonl"))
            run.interrupt()
            run.end(_LIMIT_S)
        finally:
            left = wait_until_none(mark, 30)
            kill_all(mark)
    half = [row for row in rows if row["s"] >= 30 * minutes]
    steps_of_half = half[-1]["steps"] - half[0]["steps"]
    cpu_s = {part: half[-1][part]["cpu_s"] - half[0][part]["cpu_s"] for part in PARTS}
    grown: dict[str, dict[str, Any]] = {}
    for part in PARTS:
        for what in ("uss", "heaps"):
            fit = growth([([row["s"] for row in half], [row[part][what] for row in half])])
            mb, noise = (v * minutes / 120 for v in (fit.per_hour, fit.noise)) if fit else (0, 0)
            grown.setdefault(part, {})[what] = {"mb": round(mb, 2), "noise": round(noise, 2)}
    return {
        "arenas": arenas,
        "started_s": started_s,
        "steps": steps,
        "evaluations": evaluations,
        "cpu_ms_a_step": {p: round(1000 * s / steps_of_half, 2) for p, s in cpu_s.items()},
        "grown_in_second_half": grown,
        "left_behind": list(left.values()),
        "rows": rows,
    }


def main() -> int:
    """Do a run with each number of arenas."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--arenas", nargs="+", default=["default"], metavar="N")
    parser.add_argument(
        "--out", type=Path, default=Path("benchmarks/results/actor-memory-2cpu.json")
    )
    options = parser.parse_args()
    report: dict[str, Any] = describe_call() | {"packages": package_versions(), "runs": []}
    for arenas in options.arenas:
        report["runs"].append(one_run(options.minutes, arenas))
        print(json.dumps(report["runs"][-1] | {"rows": None}), flush=True)
        options.out.write_text(json.dumps(report) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
