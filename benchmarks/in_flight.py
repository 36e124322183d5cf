"""Many thousands of samples in flight in one run: what its parts make of them.

The trial `samples` of benchmarks/load.py. Each run has all its parts, but for the engine:
tests/timed_backend.py draws tokens by chance and takes a time for each, which grows with the number
of samples, so that as many samples a second may end in each run. Each step has a weight sync, which
interrupts all samples in flight.
"""

from __future__ import annotations

import os
import statistics
import time
from pathlib import Path
from typing import Any

from ray_apr.run.folder import read_rows
from tests.killed_parts import KilledRun
from tests.scripted_runs import SCRIPTED, judge, spans, step_s
from tests.watched_processes import Watch

ROOT = Path(__file__).parents[1]
BACKEND = ROOT / "tests/timed_backend.py"
SAMPLES = (2000, 20000)
RATE = 400.0
"""Samples that may end in a second."""
BATCH, STEPS = 1000, 6
MEAN, LONGEST = 24.5, 48
"""Tokens of a response."""
LOOK_EVERY_S = 5.0
_LIMIT_S = 400.0


def settings(num_samples: int, log: Path) -> tuple[str, ...]:
    """Of a run with so many samples in flight, whose engine writes a log."""
    token_s = num_samples / (RATE * MEAN)
    kwargs = f"{{num_ids: 17, longest: {LONGEST}, token_s: {token_s:.4f}, log: {log}}}"
    return (
        *SCRIPTED, f"rollout.engine.factory={BACKEND}:TimedBackend", f"reward={BACKEND}:reward",
        f"rollout.engine.kwargs={kwargs}", f"train.batch_size={BATCH}", f"train.steps={STEPS}",
        "train.checkpoint_every=2", f"partial_rollout.oversampling_factor={num_samples / BATCH}",
        "partial_rollout.max_staleness=30", "partial_rollout.max_live_batches=null",
        f"partial_rollout.max_inflight={num_samples}",
    )  # fmt: skip


def many_samples(num_samples: int, folder: Path, mark: str, env: dict[str, str]) -> dict[str, Any]:
    """Do a run with so many samples in flight."""
    path = [str(ROOT), env.get("PYTHONPATH", "")]  # the backend takes parts of the tests
    env = env | {"PYTHONPATH": os.pathsep.join(filter(None, path))}
    log, watch = folder / "syncs.jsonl", Watch(mark)
    run = KilledRun(folder, mark, env, settings(num_samples, log))
    run.start()
    run.wait_for_step(1, _LIMIT_S)
    began = time.monotonic()
    while run.is_alive and time.monotonic() - began < _LIMIT_S:
        watch.look(time.monotonic() - began, folder / "run")
        time.sleep(LOOK_EVERY_S)
    code = run.end(LOOK_EVERY_S)
    mib = {
        name.rpartition("/")[0]: round(max(row["uss"] for row in rows) / 2**20)
        for name, rows in sorted(watch.processes.items(), key=lambda item: item[1][-1]["uss"])
    }
    found: dict[str, Any] = {"exit_code": code, "step_s": step_s(run.times), "most_mib": mib}
    if code:
        return found | {"ok": False, "log": run.tail}
    found |= judge(folder / "run", STEPS) | {"seconds_of": spans(folder / "run")}
    return found | figures(folder / "run", read_rows(log))


def figures(folder: Path, syncs: list[dict[str, Any]]) -> dict[str, Any]:
    """Samples a second, those in flight, and how long they take to be there again after a sync."""
    rows = read_rows(folder / "metrics.jsonl")
    first, last = rows[1], rows[-1]
    again = [row["until_as_many_run_s"] for row in syncs]
    return {
        "samples_per_s": round(BATCH * (len(rows) - 2) / (last["time_s"] - first["time_s"]), 1),
        "in_flight": [row["calls"] for row in syncs],
        "until_as_many_run_s": again,
        "until_as_many_run_s_median": round(statistics.median(again), 3) if again else None,
    }
