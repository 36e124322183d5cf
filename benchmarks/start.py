"""Seconds from the command of a run to its first tokens, its first step and its end.

    python benchmarks/start.py --runs 3 --out benchmarks/results/start-2cpu.json
    python benchmarks/start.py --beside OTHER_CHECKOUT --set rollout.engine.device=cuda ...

The arithmetic example trains for two steps, again and again; with `--beside` in turns with the code
of another checkout. The first run of each finds no compiled code where `VLLM_CACHE_ROOT` is new.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from ray_apr.run.folder import read_rows
from tests.killed_parts import KilledRun
from tests.processes import kill_all, marked_environment

ROOT = Path(__file__).parents[1]
LIMIT_S = 600.0
"""Of the start, and of the rest."""


def measure(checkout: Path, *settings: str) -> dict[str, float]:
    """One run of a checkout's code.

    Returns:
        Seconds since the command: until Ray runs and the run begins, the engines are ready, the
        first request is under way, the first step has ended, and the command has.
    """
    mark, env = marked_environment()
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(checkout), env.get("PYTHONPATH"))))
    with tempfile.TemporaryDirectory(prefix="start-", ignore_cleanup_errors=True) as name:
        run = KilledRun(Path(name), mark, env, ("train.steps=2", *settings))
        began = time.monotonic()
        try:
            run.start()
            run.wait_for_step(1, LIMIT_S)
            first_step = time.monotonic() - began
            assert run.end(LIMIT_S) == 0, run.tail
            end = time.monotonic() - began
            spans = read_rows(run.folder / "run" / "timeline.jsonl")
            begin = first_step - run.times[0]
        finally:
            kill_all(mark)
    return {
        "begin_s": begin,
        "engines_ready_s": begin + max(s["end_s"] for s in spans if s["what"] == "start"),
        "first_tokens_s": begin + min(s["start_s"] for s in spans if s["what"] == "generate"),
        "first_step_s": first_step,
        "end_s": end,
    }


def main() -> int:
    """Do the runs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=3, help="of each checkout")
    parser.add_argument("--beside", type=Path, help="another checkout")
    parser.add_argument("--set", action="append", default=[], dest="settings")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/start-2cpu.json"))
    options = parser.parse_args()
    checkouts = {"this": ROOT} | ({"beside": options.beside.resolve()} if options.beside else {})
    report: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "settings": options.settings}
    report["runs"] = {name: [] for name in checkouts}
    for _ in range(options.runs):
        for name, checkout in checkouts.items():
            found = measure(checkout, *options.settings)
            report["runs"][name].append({key: round(value, 2) for key, value in found.items()})
            print(name, report["runs"][name][-1], flush=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
