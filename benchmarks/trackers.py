"""What trackers cost, and whether they have every figure of a run.

    python benchmarks/trackers.py --pairs 2 --out benchmarks/results/trackers-2cpu.json

The quickstart, with W&B (offline), MLflow (SQLite) and TensorBoard and without them, in turns. Of
each run with them every number of metrics.jsonl is looked for in all three. Seconds are those from
the first token to the end of the training.
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

sys.path.insert(0, str(Path(__file__).parents[1]))

from ray_apr.run.folder import read_rows
from ray_apr.trackers.mlflow import metric_name
from ray_apr.trackers.rows import numbers
from tests.tracked import read_mlflow, read_tensorboard, read_wandb

CONFIG = Path(__file__).parents[1] / "examples/arithmetic/quickstart.yaml"
LIMIT_S = 900.0


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
    subprocess.run(command, check=True, timeout=LIMIT_S, stdout=subprocess.DEVNULL, cwd=root)
    final = json.loads((root / name / "final.json").read_text())
    found = {"seconds": final["wall_s"] - final["setup_s"], "ledger_error": final["ledger_error"]}
    return found | (missing(root / name) if is_tracked else {})


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
    """Run pairs; 0 if nothing is missing."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/trackers-2cpu.json"))
    options = parser.parse_args()
    rows: dict[str, list[dict[str, Any]]] = {"without": [], "with": []}
    with tempfile.TemporaryDirectory(prefix="trackers-") as folder:
        for pair in range(options.pairs):
            kinds = list(rows)
            for kind in kinds if pair % 2 else kinds[::-1]:
                is_tracked = kind == "with"
                name = f"{kind}-{pair}"
                rows[kind].append(run(Path(folder), name, options.steps, is_tracked=is_tracked))
                print(name, rows[kind][-1], flush=True)
    medians = {kind: statistics.median(r["seconds"] for r in of) for kind, of in rows.items()}
    report = {
        "date": time.strftime("%Y-%m-%d"),
        "steps": options.steps,
        "runs": rows,
        "ratio": medians["with"] / medians["without"],
    }
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({"seconds": medians, "ratio": report["ratio"]}))
    wrong = sum(row[name] for row in rows["with"] for name in ("wandb", "mlflow", "tensorboard"))
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
