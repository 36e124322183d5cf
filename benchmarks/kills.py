"""Kill -9 of every kind of process, at random moments of whole runs, and what each death costs.

    python benchmarks/kills.py --kills 24 --seed 1 --out benchmarks/results/kills-2cpu.json

A run loses one part after the other, each kind as often as the others, in an order and after
steps that the seed draws; a driver that is killed is followed by `--resume`. Each run has to reach
its last step and to pass `ray-apr verify`. Lost seconds are those until two more steps than before
the death are trained, beyond what two steps take. The file is written after each run, and runs that
it has are not done again.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from ray_apr.run.folder import read_rows
from ray_apr.tools.verify import verify
from tests.killed_parts import KINDS, SMALL, KilledRun
from tests.processes import kill_all, marked_environment, wait_until_none

A_RUN = 12
"""Kills of one run."""
FIRST_STEP, STEPS_A_KILL = 6, 12
_STEPS_AFTER = 2
SETTINGS = (
    *SMALL,
    "evaluation={prompts: held_out.parquet, every: 10, at_start: false, max_inflight: 4}",
)
_END_S = 600.0


def order(seed: int, number: int, parts: Sequence[str], kills: int) -> list[str]:
    """Which parts a run loses, one after the other."""
    draw = random.Random(f"{seed}/{number}")
    drawn: list[str] = []
    while len(drawn) < kills:
        drawn += draw.sample(parts, len(parts))
    return drawn[:kills]


def one_run(seed: int, number: int, parts: Sequence[str], kills: int) -> dict[str, Any]:
    """Do one run; what became of it."""
    draw = random.Random(f"{seed}/{number}/moments")
    mark, env = marked_environment()
    done: list[dict[str, Any]] = []
    result: dict[str, Any] = {"run": number, "kills": done}
    with tempfile.TemporaryDirectory(prefix="kills-") as name:
        folder = Path(name)
        steps = FIRST_STEP + STEPS_A_KILL * kills
        run = KilledRun(folder, mark, env, (*SETTINGS, f"train.steps={steps}"))
        began = time.monotonic()
        try:
            run.start()
            for number_of, part in enumerate(order(seed, number, parts, kills)):
                run.wait_for_step(FIRST_STEP + STEPS_A_KILL * number_of + draw.randint(0, 6))
                time.sleep(draw.uniform(0.0, 1.0))
                done.append(one_kill(run, part, draw.randint(0, 99)))
            result |= {"exit_code": run.end(_END_S)}
            result |= judge(folder / "run", steps)
        except (AssertionError, subprocess.TimeoutExpired) as error:
            result |= {"ok": False, "error": str(error)[-4000:], "log": run.tail[-4000:]}
        finally:
            result["seconds"] = round(time.monotonic() - began, 1)
            left = wait_until_none(mark, 30)
            kill_all(mark)
        if left:
            result |= {"ok": False, "left_behind": list(left.values())}
    return result


def one_kill(run: KilledRun, part: str, number: int) -> dict[str, Any]:
    """Kill a part, and wait until the run is two steps further; what it cost."""
    before = run.times
    step_s = statistics.median(b - a for a, b in zip(before[-7:], before[-6:], strict=False))
    killed, began = run.kill(part, number), time.monotonic()
    run.wait_for_step(len(before) + _STEPS_AFTER)
    lost_s = time.monotonic() - began - _STEPS_AFTER * step_s
    return {
        "part": part,
        "killed": killed,
        "step": len(before),
        "step_s": round(step_s, 3),
        "lost_s": round(max(0.0, lost_s), 2),
    }


def judge(folder: Path, steps: int) -> dict[str, Any]:
    """Whether a run kept what it promises, from its folder."""
    checks = verify(folder)
    final = json.loads((folder / "final.json").read_text())
    restarts = [*read_rows(folder / "restarts.jsonl"), *read_rows(folder / "resumes.jsonl")]
    return {
        "ok": all(check.ok for check in checks) and final["steps"] == steps,
        "checks": {check.name: check.seen for check in checks},
        "ledger_error": final["ledger_error"],
        "tokens_generated": final["tokens_generated"],
        "tokens_discarded": {r: n for r, n in final["tokens_discarded"].items() if n},
        "tokens_lost": sum(row["tokens_lost"] for row in restarts),
    }


def summary(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Median and worst of what each kind of death cost."""
    kills = [kill for run in runs for kill in run["kills"] if kill["killed"]]
    by_part = {part: [k["lost_s"] for k in kills if k["part"] == part] for part in KINDS}
    return {
        "num_kills": len(kills),
        "num_runs": len(runs),
        "num_ok": sum(bool(run.get("ok")) for run in runs),
        "lost_s": {
            part: {"num": len(s), "median": round(statistics.median(s), 2), "worst": max(s)}
            for part, s in by_part.items()
            if s
        },
    }


def main() -> int:
    """Do the runs that are left; 0 if all ended well."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=24)
    parser.add_argument("--parts", nargs="+", choices=KINDS, default=list(KINDS), metavar="PART")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/kills-2cpu.json"))
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="begin none after this")
    options = parser.parse_args()
    report: dict[str, Any] = {"settings": list(SETTINGS), "seed": options.seed, "runs": []}
    if options.out.exists():
        report = json.loads(options.out.read_text())
    done = {run["run"] for run in report["runs"]}
    began = time.monotonic()
    for number in range(-(-options.kills // A_RUN)):
        if number in done or time.monotonic() - began > options.limit_s:
            continue
        kills = min(A_RUN, options.kills - number * A_RUN)
        result = one_run(options.seed, number, options.parts, kills)
        report["runs"].append(result)
        report |= summary(report["runs"])
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=1) + "\n")
        print(json.dumps({k: v for k, v in result.items() if k != "log"}), flush=True)
    print(f"{report['num_ok']} of {report['num_runs']} runs ended well")
    return 0 if report["num_ok"] == report["num_runs"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
