"""What the journal costs: the same run with it and without it, in turns.

    python benchmarks/journal.py --pairs 3 --out benchmarks/results/journal-2cpu.json

Speed is that of generation and training together, from the first batch on: tokens generated over
the time in which steps were trained. The order within a pair alternates.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from ray_apr.run.folder import read_rows
from tests.processes import kill_all, marked_environment
from tests.whole_runs import command

SETTINGS = (
    "train.batch_size=64", "rollout.group_size=4", "rollout.max_response_tokens=96",
    "rollout.num_replicas=1", "scaling={num_workers: 1, use_gpu: false}", "train.steps=80",
)  # fmt: skip
_LIMIT_S = 600


def one_run(enabled: bool) -> dict[str, Any]:
    """Do one run; its figures."""
    mark, env = marked_environment()
    with tempfile.TemporaryDirectory(prefix="journal-") as name:
        folder = Path(name)
        setting = f"rollout.journal={{enabled: {str(enabled).lower()}}}"
        try:
            subprocess.run(
                command(folder, *SETTINGS, setting), env=env, cwd=folder, check=True,
                stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT, timeout=_LIMIT_S,
            )  # fmt: skip
        finally:
            kill_all(mark)
        run = folder / "run"
        steps = read_rows(run / "metrics.jsonl")
        final = json.loads((run / "final.json").read_text())
        size = sum(file.stat().st_size for file in (run / "journal").glob("*"))
    seconds = steps[-1]["time_s"] - steps[0]["time_s"]
    generated = steps[-1]["tokens_generated"] - steps[0]["tokens_generated"]
    return {
        "journal": enabled,
        "tokens_per_s": round(generated / seconds, 1),
        "seconds": round(seconds, 2),
        "tokens_generated": final["tokens_generated"],
        "bytes": size,
    }


def main() -> int:
    """Do all runs, and write their figures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/journal-2cpu.json"))
    options = parser.parse_args()
    runs: list[dict[str, Any]] = []
    for pair in range(options.pairs):
        for enabled in ((True, False), (False, True))[pair % 2]:
            runs.append(one_run(enabled))
            print(json.dumps(runs[-1]), flush=True)
    speed = {
        on: statistics.median(run["tokens_per_s"] for run in runs if run["journal"] is on)
        for on in (True, False)
    }
    written = [run for run in runs if run["journal"]]
    report = {
        "settings": list(SETTINGS),
        "tokens_per_s": {"with": speed[True], "without": speed[False]},
        "ratio": round(speed[True] / speed[False], 4),
        "bytes_per_token": round(
            sum(run["bytes"] for run in written) / sum(run["tokens_generated"] for run in written),
            1,
        ),
        "runs": runs,
    }
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({name: report[name] for name in ("tokens_per_s", "ratio", "bytes_per_token")}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
