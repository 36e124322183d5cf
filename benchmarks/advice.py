"""Does it help to follow what `ray-apr doctor` advises, and as much as it says?

    python benchmarks/advice.py --folder runs --out benchmarks/results/advice-2cpu.json

Of each case there is a run with a fault and one that follows the advice for it, and nothing else is
changed. The doctor's estimate, of the first run alone, is held against what the second one took.
Seconds are of a step, without those in which engines fill. A run that the folder has is not made
again.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from host import describe_call, package_versions

from ray_apr.tools.report.load import RunData, load_run
from ray_apr.tools.simulator.of_run import estimate, measured_step_s

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "examples/arithmetic/quickstart.yaml"
LIMIT_S = 280.0
WAITS = """
import asyncio

async def reward(sample):
    await asyncio.sleep({seconds})
    return float(sample.response_text.rpartition(",")[2] == sample.row["answer"])
"""
CASES: dict[str, tuple[str, dict[str, str], float, str]] = {
    "rewards": ("rollout.reward.concurrency: 32", {}, 0.75, "rollout.reward.concurrency=32"),
    "rewards-followed": (
        "rollout.reward.concurrency: 64", {"rollout.reward.concurrency": "32"}, 0.75,
        "rollout.reward.concurrency=64",
    ),
    "sync": ("mode: apr", {"mode": "sync"}, 0.0, "mode=apr"),
}  # fmt: skip
"""Of each: the advice, as far as it names its setting; settings of the first run; seconds of its
rewards; what follows the advice."""


def run(folder: Path, name: str, settings: dict[str, str], reward_s: float, steps: int) -> RunData:
    """Train the quickstart with settings, unless the folder has it; rewards that wait are async."""
    final = folder / name / "final.json"
    if not final.exists() or json.loads(final.read_text())["status"] != "ok":
        shutil.rmtree(folder / name, ignore_errors=True)
        if reward_s:
            code = folder / f"waits_{reward_s:g}.py".replace(".", "_", 1)
            code.write_text(WAITS.format(seconds=reward_s))
            settings = {**settings, "reward": f"{code}:reward"}
        settings = {
            "train.steps": str(steps), "train.batch_size": "64", "run.name": name,
            "run.storage_path": str(folder), **settings,
        }  # fmt: skip
        command = [sys.executable, "-m", "ray_apr", "train", str(CONFIG)]
        for pair in settings.items():
            command += ["--set", "=".join(pair)]
        subprocess.run(command, check=True, timeout=LIMIT_S, stdout=subprocess.DEVNULL)
    return load_run(folder / name)


def one_case(folder: Path, name: str, steps: int) -> dict[str, Any]:
    """Both runs of a case."""
    advice, settings, reward_s, followed = CASES[name]
    before = run(folder, name, settings, reward_s, steps)
    key, _, value = followed.partition("=")
    after = run(folder, f"{name}-followed", {**settings, key: value}, reward_s, steps)
    guess = estimate(before)
    (gain,) = (change.gain for change in guess.changes if change.what.startswith(advice))
    seconds, seconds_after = measured_step_s(before), measured_step_s(after)
    return {
        "settings": settings,
        "reward_s": reward_s,
        "advice": advice,
        "simulated_off": round(guess.off, 3),
        "step_s": round(seconds, 3),
        "step_s_followed": round(seconds_after, 3),
        "gain_estimated": round(gain, 3),
        "gain_measured": round(seconds / seconds_after - 1, 3),
        "ledger_errors": [(r.final or {}).get("ledger_error") for r in (before, after)],
    }


def main() -> None:
    """Run the cases, and write what they say."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--steps", type=int, default=26)
    parser.add_argument("--folder", type=Path, default=Path("runs"))
    parser.add_argument("--note", help="what the file says beside the figures")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/advice-2cpu.json"))
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    result = {**describe_call(), "packages": package_versions(), "steps": args.steps, "cases": {}}
    result |= {"note": args.note} if args.note else {}
    for name in args.cases:
        result["cases"][name] = one_case(args.folder.resolve(), name, args.steps)
        print(name, json.dumps(result["cases"][name]), flush=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
