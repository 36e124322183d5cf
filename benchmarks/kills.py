"""Kill -9 of every kind of process, at random moments of whole runs, and what each death costs.

    python benchmarks/kills.py --kills 24 --seed 1 --out benchmarks/results/kills-2cpu.json

A run loses one part after the other, each kind as often as the others, in an order and after
steps that the seed draws; a driver that is killed is followed by `--resume`, and a node whose
raylet is killed by a new one. A run that loses a raylet is on a cluster of two nodes, the others
start their own Ray. Each run has to reach its last step and to pass `ray-apr verify`. Lost seconds
are those until two more steps than before the death are trained, beyond what two steps take. The
file is written after each run, and runs that it has are not done again.

Several of these may go on side by side, each with its own `--seed` and `--out`; then

    python benchmarks/kills.py --merge a.json b.json --out benchmarks/results/kills-2cpu.json

makes one file of theirs. `--set` changes settings, such as those of engines and train workers that
take turns on one GPU:

    python benchmarks/kills.py --kinds "engine core" buffer "train worker" driver \
        --set mode=sync --set rollout.engine.device=cuda --set rollout.engine.placement=colocated \
        --set rollout.num_replicas=1 --set "scaling={num_workers: 1, use_gpu: true}"
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from ray_apr.run.folder import read_rows
from ray_apr.tools.verify import verify
from tests.killed_parts import KINDS, SMALL, KilledRun
from tests.processes import kill_all, marked_environment, wait_until_none
from tests.second_node import SecondNode
from tests.whole_runs import running_cluster

A_RUN = 7
"""Kills of one run: about every other run loses a raylet."""
FIRST_STEP, STEPS_A_KILL = 6, 12
CPUS_OF_NODES = (3, 2)
"""What two nodes have, together as much as a run's own Ray."""
_STEPS_AFTER = 2
SETTINGS = (
    *SMALL,
    "evaluation={prompts: held_out.parquet, every: 10, at_start: false, max_inflight: 4}",
)
_END_S = 600.0
_FIND_S = 10.0
"""Longest time in which a part that was just replaced may be there again."""


def order(seed: int, kinds: Sequence[str]) -> Iterator[str]:
    """Which parts are lost one after the other, over all runs: each kind once, then again."""
    draw = random.Random(seed)
    while True:
        yield from draw.sample(kinds, len(kinds))


@contextlib.contextmanager
def two_nodes(env: dict[str, str]) -> Iterator[tuple[SecondNode, dict[str, str]]]:
    """Start a cluster of two nodes; the second one, and the environment of a run on them."""
    first, second = CPUS_OF_NODES
    with running_cluster(env, num_cpus=first) as (address, _):
        env = {**env, "RAY_AUTH_MODE": "disabled"}
        node = SecondNode(address, env, num_cpus=second)
        node.start()
        node.wait_until_started()
        yield node, {**env, "RAY_ADDRESS": address}


def one_run(
    seed: int, number: int, parts: Sequence[str], settings: Sequence[str] = SETTINGS
) -> dict[str, Any]:
    """Do one run with these settings that loses these parts; what became of it."""
    draw = random.Random(f"{seed}/{number}/moments")
    done: list[dict[str, Any]] = []
    result: dict[str, Any] = {"seed": seed, "run": number, "kills": done}
    mark, env = marked_environment()
    with tempfile.TemporaryDirectory(prefix="kills-", ignore_cleanup_errors=True) as name:
        folder, began = Path(name), time.monotonic()
        steps = FIRST_STEP + STEPS_A_KILL * len(parts)
        env["RAY_TMPDIR"] = name
        run = KilledRun(folder, mark, env, (*settings, f"train.steps={steps}"))
        try:
            with contextlib.ExitStack() as stack:
                if "raylet" in parts:
                    run.node, run.env = stack.enter_context(two_nodes(env))
                run.start()
                for number_of, part in enumerate(parts):
                    run.wait_for_step(FIRST_STEP + STEPS_A_KILL * number_of + draw.randint(0, 6))
                    time.sleep(draw.uniform(0.0, 1.0))
                    done.append(one_kill(run, part, draw.randint(0, 99)))
                result |= {"exit_code": run.end(_END_S)}
                result |= judge(folder / "run", steps)
        except (AssertionError, subprocess.TimeoutExpired, OSError, ValueError) as error:
            result |= {"ok": False, "error": str(error)[-4000:]}
        finally:
            if not result.get("ok"):
                result["log"] = run.tail[-4000:]
            result["seconds"] = round(time.monotonic() - began, 1)
            left = wait_until_none(mark, 30)
            kill_all(mark)
        if left:
            result |= {"ok": False, "left_behind": list(left.values())}
    return result


def one_kill(run: KilledRun, part: str, number: int) -> dict[str, Any]:
    """Kill a part, and wait until the run is two steps further; what it cost."""
    deadline = time.monotonic() + _FIND_S
    while not run.pids(part) and time.monotonic() < deadline:
        time.sleep(0.1)
    carried = {"carried": run.node.carries()} if part == "raylet" and run.node else {}
    before = run.times
    step_s = statistics.median(b - a for a, b in zip(before[-7:], before[-6:], strict=False))
    killed, began = run.kill(part, number), time.monotonic()
    run.wait_for_step(len(before) + _STEPS_AFTER)
    lost_s = time.monotonic() - began - _STEPS_AFTER * step_s
    return {
        "part": part,
        "killed": killed,
        **carried,
        "step": len(before),
        "step_s": round(step_s, 3),
        "lost_s": round(max(0.0, lost_s), 2),
    }


def judge(folder: Path, steps: int) -> dict[str, Any]:
    """Whether a run kept what it promises, from its folder."""
    checks = verify(folder)
    final = json.loads((folder / "final.json").read_text())
    restarts, resumes = read_rows(folder / "restarts.jsonl"), read_rows(folder / "resumes.jsonl")
    again = [(row["time_s"], row["died"], row["seconds"]) for row in restarts]
    again += [(row["time_s"], row["ended"], None) for row in resumes]
    return {
        "ok": all(check.ok for check in checks) and final["steps"] == steps,
        "checks": {check.name: check.seen for check in checks},
        "ledger_error": final["ledger_error"],
        "tokens_generated": final["tokens_generated"],
        "tokens_discarded": {r: n for r, n in final["tokens_discarded"].items() if n},
        "tokens_lost": sum(row["tokens_lost"] for row in (*restarts, *resumes)),
        "began_again": [
            {"time_s": time_s, "after": why[:300], "seconds": seconds}
            for time_s, why, seconds in sorted(again, key=lambda row: row[0])
        ],
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


def write(
    runs: list[dict[str, Any]], out: Path, settings: Sequence[str] = SETTINGS
) -> dict[str, Any]:
    """Write the runs, their settings and what they come to; returns the last."""
    runs.sort(key=lambda run: (run["seed"], run["run"]))
    found = summary(runs)
    out.parent.mkdir(parents=True, exist_ok=True)
    report = {"settings": list(settings), **found, "runs": runs}
    out.write_text(json.dumps(report, indent=1) + "\n")
    return found


def runs_of(*files: Path) -> list[dict[str, Any]]:
    """Those of all files that exist; each run once."""
    found = [run for file in files if file.exists() for run in json.loads(file.read_text())["runs"]]
    return list({(run["seed"], run["run"]): run for run in found}.values())


def main() -> int:
    """Do the runs that are left; 0 if all ended well."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=26)
    parser.add_argument("--a-run", type=int, default=A_RUN, help="kills of one run")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/kills-2cpu.json"))
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="begin none after this")
    parser.add_argument("--merge", nargs="+", type=Path, metavar="FILE", help="only join files")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C", help="a setting")
    options = parser.parse_args()
    settings = (*SETTINGS, *options.set)
    runs = runs_of(options.out, *options.merge or ())
    found = write(runs, options.out, settings) if options.merge else summary(runs)
    parts = list(itertools.islice(order(options.seed, options.kinds), options.kills))
    done = {run["run"] for run in runs if run["seed"] == options.seed}
    began = time.monotonic()
    for number, start in enumerate(range(0, len(parts), options.a_run)):
        is_late = time.monotonic() - began > options.limit_s
        if options.merge or number in done or is_late:
            continue
        result = one_run(options.seed, number, parts[start : start + options.a_run], settings)
        runs.append(result)
        found = write(runs, options.out, settings)
        print(json.dumps({k: v for k, v in result.items() if k != "log"}), flush=True)
    print(f"{found['num_ok']} of {found['num_runs']} runs ended well")
    return 0 if found["num_ok"] == found["num_runs"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
