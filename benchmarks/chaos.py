"""Kill -9 of an engine core in runs with two engines, half of them inside of a weight sync.

    python benchmarks/chaos.py --runs 40 --out benchmarks/results/chaos-2cpu.json

A run that was done is not done again: the file is written after each, and goes on where it ended.
Each moment is drawn from the seed and the number of the run. Inside of a sync: the first one, in
which the group forms, or a later one, up to `SYNC_S` after its begin; else at any moment of a step.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.engine_kills import SMALL, STEPS, run_and_kill
from tests.processes import kill_all, marked_environment, wait_until_none

SYNC_S = (0.6, 0.25)
"""Longest delays of kills inside of the first sync, and of a later one, in seconds."""
STEP_S = 4.0
"""The same of a kill at any moment."""


def moment(seed: int, number: int) -> tuple[int, float]:
    """After which step, and how long after its gather, a run is hit; odd ones inside a sync."""
    draw = random.Random(f"{seed}/{number}")
    if number % 2:
        step = 1 if number % 4 == 1 else draw.randint(2, STEPS - 2)
        return step, draw.uniform(0.0, SYNC_S[step > 1])
    return draw.randint(1, STEPS - 2), draw.uniform(0.0, STEP_S)


def one_run(seed: int, number: int) -> dict[str, Any]:
    """Do one run; what became of it."""
    step, delay_s = moment(seed, number)
    mark, env = marked_environment()
    try:
        with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
            result = run_and_kill(mark, env, Path(folder), after_step=step, delay_s=delay_s)
        left = wait_until_none(mark, 30)
        if left:
            result |= {"ok": False, "left_behind": list(left.values())}
    finally:
        kill_all(mark)
    return {"run": number, "aimed_at_sync": bool(number % 2), **result}


def main() -> int:
    """Do the runs that are left; 0 if all ended well."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/chaos-2cpu.json"))
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="begin none after this")
    options = parser.parse_args()
    report: dict[str, Any] = {"settings": list(SMALL), "seed": options.seed, "runs": []}
    if options.out.exists():
        report = json.loads(options.out.read_text())
    done = {run["run"] for run in report["runs"]}
    began = time.monotonic()
    for number in range(options.runs):
        if number in done or time.monotonic() - began > options.limit_s:
            continue
        result = one_run(options.seed, number)
        report["runs"].append(result)
        runs = report["runs"]
        report["num_runs"], report["num_ok"] = len(runs), sum(run["ok"] for run in runs)
        report["num_in_sync"] = sum(run.get("in_sync", False) for run in runs)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=1) + "\n")
        print(json.dumps({k: v for k, v in result.items() if k != "log"}), flush=True)
    print(f"{report['num_ok']} of {report['num_runs']} runs ended well")
    return int(report["num_ok"] < report["num_runs"])


if __name__ == "__main__":
    sys.exit(main())
