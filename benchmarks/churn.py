"""Engines come and go in a run: from 2 to 8 and back to 2 on CPU, by ``ray-apr scale``.

    python benchmarks/churn.py --replicas 2 8 2 --out benchmarks/results/churn-2cpu.json
    python benchmarks/churn.py --replicas 1 2 1 --set rollout.engine.device=cuda --out gpus.json

The second one has engines on GPUs, and the trainer on CPU.

The arithmetic example trains in short steps. After some of them the first change is asked for, and
so on; after some more the run is stopped, and proved by ``ray-apr verify``. For each change: how
long it took until the engines were ready; when each newcomer began its first request after that;
and how long those that stay were paused, or had nothing to do, in one piece and beside the weight
syncs: from the request until some seconds after the answer, and then until the next request. The
same before the first change, to compare.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from ray_apr.run.folder import read_rows
from tests.processes import kill_all, marked_environment, wait_until_none
from tests.whole_runs import start_run

SETTINGS = (
    "train.steps=1000", "train.batch_size=32", "rollout.group_size=4",
    "rollout.max_response_tokens=128", "rollout.sampling.min_tokens=128",
    "scaling={num_workers: 1, use_gpu: false}", "ray.num_cpus=12",
)  # fmt: skip
"""All responses are as long as can be, so that the engines have always something to do."""
STEPS_BETWEEN = 8
"""Steps before, between and after the changes."""
SETTLES_S = 10.0
"""After the answer, in which the first weight sync with other engines falls."""
LIMIT_S = 1200.0
"""Of a change, and of the steps between two."""


class Folder:
    """What a run has written."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def rows(self, name: str) -> list[dict[str, Any]]:
        """Whole lines of a file."""
        return read_rows(self.path / name)

    def wait_for_steps(self, number: int) -> None:
        """Wait until so many steps are done.

        Raises:
            TimeoutError: If they are not for too long.
        """
        deadline = time.monotonic() + LIMIT_S
        while len(self.rows("metrics.jsonl")) < number:
            if time.monotonic() > deadline:
                raise TimeoutError(f"no step {number} within {LIMIT_S:g} s")
            time.sleep(0.2)


def scale(folder: Folder, replicas: int, env: dict[str, str]) -> dict[str, Any]:
    """Ask for a number of engines; the run's answer, and what the command took."""
    command = [sys.executable, "-m", "ray_apr", "scale", str(folder.path)]
    began_at = time.time()
    done = subprocess.run(
        [*command, "--replicas", str(replicas), "--timeout", str(LIMIT_S)],
        env=env, capture_output=True, text=True, timeout=LIMIT_S + 60, check=False,
    )  # fmt: skip
    print(done.stdout + done.stderr, end="", flush=True)
    answer = folder.rows("engines.jsonl")[-1]
    laid_at = int(answer["request_id"].partition("-")[0]) / 1e9
    return {
        "replicas": replicas,
        "exit_code": done.returncode,
        "outcome": answer["outcome"],
        "command_s": round(time.time() - began_at, 2),
        "asked_s": round(answer["time_s"] - (answer["at"] - laid_at), 3),
        "ready_s": answer["time_s"],
        "change_s": answer["seconds"],
    }


def without(
    span: tuple[float, float], others: Iterable[tuple[float, float]]
) -> list[tuple[float, float]]:
    """What is left of a span outside of others."""
    left = [span]
    for begin, end in others:
        left = [
            piece
            for a, b in left
            for piece in ((a, min(b, begin)), (max(a, end), b))
            if piece[1] > piece[0]
        ]
    return left


def stops(
    spans: list[dict[str, Any]], engines: list[str], window: tuple[float, float]
) -> dict[str, float]:
    """Longest time in one piece in which an engine was paused, or had nothing to do, outside of the
    weight syncs; seconds."""
    syncs = [(s["start_s"], s["end_s"]) for s in spans if s["actor"] == "weights"]
    found: dict[str, tuple[float, float]] = {"paused": (0.0, 0.0), "idle": (0.0, 0.0)}
    for span in spans:
        is_inside = span["end_s"] > window[0] and span["start_s"] < window[1]
        if span["actor"] not in engines or span["what"] not in found or not is_inside:
            continue
        piece = (max(span["start_s"], window[0]), min(span["end_s"], window[1]))
        longest = max(((b - a, a) for a, b in without(piece, syncs)), default=(0.0, 0.0))
        found[span["what"]] = max(found[span["what"]], longest)
    return {
        name: round(value, 3)
        for what, (seconds, at) in found.items()
        for name, value in ((f"longest_{what}_s", seconds), (f"longest_{what}_at_s", at))
    }


def first_requests(spans: list[dict[str, Any]], ready_s: float, end_s: float) -> dict[str, float]:
    """Seconds from the readiness of engines to the begin of the first request of each one that had
    none before."""
    first: dict[str, float] = {}
    for span in spans:
        if span["what"] == "generate" and span["actor"].startswith("engine"):
            first[span["actor"]] = min(first.get(span["actor"], span["start_s"]), span["start_s"])
    return {
        actor: round(begin - ready_s, 2)
        for actor, begin in sorted(first.items())
        if ready_s - 60 < begin < end_s and begin > ready_s
    }


def describe(folder: Folder, changes: list[dict[str, Any]], numbers: list[int]) -> dict[str, Any]:
    """The figures of each change, and of the time before the first one."""
    spans, steps = folder.rows("timeline.jsonl"), folder.rows("metrics.jsonl")
    stay = [f"engine-{i}" for i in range(min(numbers))]
    ends = [*(change["asked_s"] for change in changes[1:]), steps[-1]["time_s"]]

    def of_window(begin: float, end: float) -> dict[str, Any]:
        inside = [s for s in steps if begin < s["time_s"] <= end]
        stopped = [s["generation_stopped_s"] for s in inside]
        return {
            "steps": len(inside),
            "step_s": round((end - begin) / max(1, len(inside)), 2),
            "longest_sync_stop_s": round(max(stopped, default=0.0), 3),
            **stops(spans, stay, (begin, end)),
        }

    for change, end in zip(changes, ends, strict=True):
        settled = min(end, change["ready_s"] + SETTLES_S)
        change["while_it_changes"] = of_window(change["asked_s"], settled)
        change["afterwards"] = of_window(settled, end)
        change["first_request_s"] = first_requests(spans, change["ready_s"], end)
        change["request_to_ready_s"] = round(change["ready_s"] - change["asked_s"], 2)
    first = steps[1]["time_s"]
    return {"before": of_window(first, changes[0]["asked_s"]), "changes": changes}


def run(numbers: list[int], settings: list[str]) -> dict[str, Any]:
    """Do the run; what became of it."""
    mark, env = marked_environment()
    with tempfile.TemporaryDirectory(prefix="churn-") as name:
        log, folder = Path(name) / "log.txt", Folder(Path(name) / "run")
        overrides = (*settings, f"rollout.num_replicas={numbers[0]}")
        process = start_run(Path(name), env, *overrides, log=log)
        try:
            changes = []
            for number in numbers[1:]:
                folder.wait_for_steps(len(folder.rows("metrics.jsonl")) + STEPS_BETWEEN)
                changes.append(scale(folder, number, env))
            folder.wait_for_steps(len(folder.rows("metrics.jsonl")) + STEPS_BETWEEN)
            os.kill(process.pid, signal.SIGINT)
            process.wait(timeout=LIMIT_S)
            verified = subprocess.run(
                [sys.executable, "-m", "ray_apr", "verify", str(folder.path)],
                env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False,
            )  # fmt: skip
            print(verified.stdout + verified.stderr, end="", flush=True)
            final = json.loads((folder.path / "final.json").read_text())
            figures = describe(folder, changes, numbers)
            left = wait_until_none(mark, 30)
        finally:
            kill_all(mark)
            if process.poll() is None:
                process.kill()
            print(log.read_text()[-3000:], flush=True)
    waits = [s for change in changes for s in change["first_request_s"].values()]
    return {
        **figures,
        "status": final["status"],
        "ledger_error": final["ledger_error"],
        "tokens_generated": final["tokens_generated"],
        "num_engines_seen": len(final["engines"]),
        "verified": verified.returncode == 0,
        "left_behind": list(left.values()),
        "first_request_max_s": max(waits, default=None),
        "longest_paused_s": max(
            change[window]["longest_paused_s"]
            for change in changes
            for window in ("while_it_changes", "afterwards")
        ),
    }


def main() -> int:
    """Do one run; 0 if it kept to the bar."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--replicas", type=int, nargs="+", default=[2, 8, 2])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/churn-2cpu.json"))
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C", help="of the run")
    options = parser.parse_args()
    settings = [*SETTINGS, *options.set]
    report = {
        "replicas": options.replicas,
        "settings": settings,
        "date": time.strftime("%Y-%m-%d"),
        **run(options.replicas, settings),
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))
    newcomers = report["first_request_max_s"]
    is_done = all(change["outcome"] == "done" for change in report["changes"])
    ok = is_done and report["ledger_error"] == 0 and report["verified"]
    return int(not (ok and (newcomers or 0) <= 30 and report["longest_paused_s"] <= 0.2))


if __name__ == "__main__":
    sys.exit(main())
