"""What trackers cost, and whether they have every figure of a run.

    python benchmarks/trackers.py --runs 6 --out trackers.json

The quickstart, with W&B (offline), MLflow (SQLite) and TensorBoard and without them, in turns. Of
each run with them every number of metrics.jsonl is looked for in all three. `seconds` are those
from the first token to the end of the training; `step_s` those of a step, and `cpu_step_s` its CPU
time in the driver and in what that has started for a tracker, from the end of step `FIRST` to the
last one: what comes once, such as imports, is before. Runs that the file has are kept, and others
are added.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))

from ray_apr.run.folder import read_rows
from ray_apr.trackers.mlflow import metric_name
from ray_apr.trackers.rows import numbers
from tests.tracked import read_mlflow, read_tensorboard, read_wandb

CONFIG = Path(__file__).parents[1] / "examples/arithmetic/quickstart.yaml"
LIMIT_S = 900.0
KINDS = ("without", "with")
FIRST = 12
"""Steps that are left out: the first table of samples is among them."""
_LOOK_S = 0.25


def run(root: Path, name: str, steps: int, *, is_tracked: bool) -> dict[str, Any]:
    """Train once; seconds, and how many numbers each tracker has wrong or not at all."""
    settings = [f"train.steps={steps}", f"run.name={name}", f"run.storage_path={root}"]
    if is_tracked:
        settings += [
            "trackers.wandb={mode: offline}",
            f"trackers.mlflow={{tracking_uri: 'sqlite:///{root}/m.db', experiment: e}}",
            "trackers.tensorboard={}",
        ]
    command = [sys.executable, "-m", "ray_apr", "train", str(CONFIG)]
    for setting in settings:
        command += ["--set", setting]
    driver = subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=root)
    try:
        spent = cpu_of_steps(driver, root / name / "metrics.jsonl", steps)
        if driver.wait(timeout=LIMIT_S):
            raise subprocess.CalledProcessError(driver.returncode, command)
    finally:
        driver.kill()
    rows, final = (
        read_rows(root / name / "metrics.jsonl"),
        json.loads((root / name / "final.json").read_text()),
    )
    found = {
        "seconds": final["wall_s"] - final["setup_s"],
        "step_s": (rows[-1]["time_s"] - rows[FIRST]["time_s"]) / (steps - 1 - FIRST),
        "cpu_step_s": spent,
        "ledger_error": final["ledger_error"],
    }
    return found | (missing(root / name) if is_tracked else {})


def cpu_of_steps(driver: subprocess.Popen[bytes], file: Path, steps: int) -> float:
    """CPU seconds of a step in the driver and its trackers' own processes, from the end of step
    `FIRST` on."""
    deadline, begun = time.monotonic() + LIMIT_S, (0, 0.0)
    while driver.poll() is None and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
        number = len(file.read_bytes().splitlines()) if file.exists() else 0
        if number > FIRST and not begun[0]:
            begun = (number, cpu_s(driver.pid))
        if number == steps:
            return (cpu_s(driver.pid) - begun[1]) / (number - begun[0])
    raise TimeoutError(f"the run ended or took too long at {file}")


def cpu_s(pid: int) -> float:
    """CPU seconds of a process, and of those below it that are no part of Ray."""
    found = psutil.Process(pid)
    below = [p for p in found.children(recursive=True) if "wandb" in p.name()]
    return sum(p.cpu_times().user + p.cpu_times().system for p in (found, *below))


def missing(folder: Path) -> dict[str, int]:
    """How many numbers of a run's steps there are, and how many each tracker has not, or not so."""
    wandb, mlflow, board = read_wandb(folder), read_mlflow(folder), read_tensorboard(folder)
    found = {"numbers": 0, "wandb": 0, "mlflow": 0, "tensorboard": 0}
    for row in read_rows(folder / "metrics.jsonl"):
        for name, value in numbers(row):
            step, near = row["step"], 1e-6 * abs(value)  # TensorBoard has 32 bits
            found["numbers"] += 1
            found["wandb"] += wandb.get((name, step)) != value
            found["mlflow"] += mlflow.get((metric_name(name), step)) != value
            on_board = board.get((re.sub(r"[^-/\w.]", "_", name), step), float("nan"))
            found["tensorboard"] += not abs(on_board - value) <= near
    return found


def main() -> int:
    """Run both kinds in turns; 0 if nothing is missing."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=6)
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--out", type=Path, default=Path("trackers.json"))
    options = parser.parse_args()
    known = json.loads(options.out.read_text())["runs"] if options.out.exists() else {}
    rows: dict[str, list[dict[str, Any]]] = {kind: known.get(kind, []) for kind in KINDS}
    for _ in range(options.runs):
        kind = min(KINDS, key=lambda kind: len(rows[kind]))
        with tempfile.TemporaryDirectory(prefix="trackers-") as folder:
            is_tracked = kind == "with"
            rows[kind].append(run(Path(folder), kind, options.steps, is_tracked=is_tracked))
        print(kind, rows[kind][-1], flush=True)
        report = {"date": time.strftime("%Y-%m-%d"), "steps": options.steps, "runs": rows}
        report |= cost(rows) if all(rows.values()) else {}
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    wrong = sum(row[name] for row in rows["with"] for name in ("wandb", "mlflow", "tensorboard"))
    return int(wrong > 0)


def cost(rows: dict[str, list[dict[str, Any]]]) -> dict[str, float]:
    """What trackers cost: medians of both kinds, of step times the ratio, of CPU times the
    difference and its share of a step."""
    median = {
        (kind, what): statistics.median(row[what] for row in of)
        for kind, of in rows.items()
        for what in ("seconds", "step_s", "cpu_step_s")
    }
    cpu_s = median["with", "cpu_step_s"] - median["without", "cpu_step_s"]
    return {
        "ratio_of_runs": median["with", "seconds"] / median["without", "seconds"],
        "ratio_of_steps": median["with", "step_s"] / median["without", "step_s"],
        "cpu_s_more_a_step": cpu_s,
        "cpu_share_of_a_step": cpu_s / median["without", "step_s"],
    }


if __name__ == "__main__":
    sys.exit(main())
