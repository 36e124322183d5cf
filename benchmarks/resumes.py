"""One run of 64 steps that is interrupted at random steps, and gone on with by ``--resume``.

    python benchmarks/resumes.py --out benchmarks/results/resumes-2cpu.json

Each interruption is a SIGINT, or with ``--kill`` a SIGKILL of the driver, at a step that is drawn
from the seed. What must hold of the whole run is checked at the end (`tests.resumed_runs`).
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.processes import kill_all, marked_environment, wait_until_none
from tests.resumed_runs import SMALL, check_run, run_once


def main() -> int:
    """Do the run; 0 if it ended as one whole run."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--interruptions", type=int, default=5)
    parser.add_argument("--checkpoint-every", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kill", action="store_true", help="SIGKILL instead of SIGINT")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/resumes-2cpu.json"))
    options = parser.parse_args()
    draw = random.Random(options.seed)
    stops = sorted(draw.sample(range(1, options.steps), options.interruptions))
    settings = (
        f"train.steps={options.steps}",
        f"train.checkpoint_every={options.checkpoint_every}",
    )
    report: dict[str, Any] = {"settings": [*SMALL, *settings], "interrupted_after_step": stops}
    number = signal.SIGKILL if options.kill else signal.SIGINT
    with tempfile.TemporaryDirectory(prefix="resumes-") as folder:
        for stop_at in (*stops, None):
            mark, env = marked_environment()
            try:
                run_once(Path(folder), env, *settings, stop_at=stop_at, kill=number)
                left = wait_until_none(mark, 60)
                assert not left, f"processes left behind: {left}"
            finally:
                kill_all(mark)
            print(f"stopped after step {stop_at}" if stop_at else "ended", flush=True)
        run = Path(folder) / "run"
        report |= check_run(run, steps=options.steps, resumes=options.interruptions)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
