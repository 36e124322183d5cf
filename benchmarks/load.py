"""What a run does on a full disk, with a full object store, on a slow network, and under load.

    python benchmarks/load.py disk store network samples --out benchmarks/results/load-2cpu.json

Each trial is a run of the command line with engines that draw their tokens by chance
(tests/scripted_backend.py), and all else as ever; its folder is proved by `verify`.

disk: The run folder is a tmpfs of 32 MB, which the trial mounts (as root) and fills to the brim:
    once where a row, once where a checkpoint finds no room. The run has to end with an error that
    names the file, its folder and `--resume`, and to go on to its last step once there is room.
store: Ray's object store has the least that Ray takes, and another driver fills it with objects
    that it reads, so that none of them can be moved to the disk. Once the disk takes what does not
    fit, once Ray is told that it is full.
network: Engine and train worker are on two nodes, one of which is in a network namespace of its
    own; the trial makes it, and a line to it (as root). All goes over a fast line first, then over
    one that is late, loses packets and has little room.
samples: 20,000 samples in flight, beside 2,000 (benchmarks/in_flight.py).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from in_flight import SAMPLES, many_samples

from tests.killed_parts import KilledRun
from tests.processes import kill_all, marked_environment, wait_until_none
from tests.scripted_runs import SCRIPTED, judge, spans, step_s
from tests.second_node import SecondNode
from tests.slow_link import DEVICE, HERE, THERE, NoLineError, line_to_namespace
from tests.small_disk import NoDiskError, fill, small_disk
from tests.whole_runs import running_cluster

DISK_BYTES = 32 << 20
LEFT_BYTES = {"rows": 16 << 10, "checkpoint": 2 << 20}
"""Room that is left: for some rows, or for all but a checkpoint."""
CHECKPOINT_EVERY = {"rows": 1000, "checkpoint": 4}
NO_DASHBOARD = "--include-dashboard=false"
STORE_BYTES = 75 << 20
"""The least that Ray takes."""
HOG = """
import sys, time
import numpy, ray
ray.init(address=sys.argv[1], log_to_driver=False)
kept, piece = [], 5 << 20
while len(kept) * piece < int(sys.argv[2]):
    kept.append(ray.get(ray.put(numpy.zeros(piece, numpy.uint8))))
print("full", flush=True)
sys.stdin.read()
"""
LINES: dict[str, dict[str, float]] = {
    "fast": {},
    "slow": {"delay_s": 0.05, "loss": 0.01, "bytes_per_s": 12.5e6},
}
"""What each is in each direction; over the slow one an answer takes 100 ms, at 100 Mbit/s."""
CPUS_OF_NODE, CPUS_OF_PART = 4, 3
"""Of each of the two nodes, and what engine and train worker ask for: one fits on a node."""
_LIMIT_S = 400.0


def full_disk(what: str, folder: Path, mark: str, env: dict[str, str]) -> dict[str, Any]:
    """Fill the disk under a run until no `what` finds room, make room, and go on."""
    with small_disk(folder, DISK_BYTES):
        every = f"train.checkpoint_every={CHECKPOINT_EVERY[what]}"
        run = KilledRun(folder, mark, env, (*SCRIPTED, "train.steps=40", every))
        run.start()
        run.wait_for_step(6, _LIMIT_S)
        fill(folder / "ballast", LEFT_BYTES[what])
        found: dict[str, Any] = {"steps": len(run.times), "exit_code": run.end(_LIMIT_S)}
        errors = [line for line in run.said if line.startswith("error: ")]
        found["error"] = errors[-1].strip() if errors else run.tail
        found["steps_at_the_end"] = len(run.times)
        (folder / "ballast").unlink()
        run.start()
        found["exit_code_after"] = run.end(_LIMIT_S)
        if found["exit_code_after"]:
            return found | {"ok": False, "log": run.tail}
        return found | judge(folder / "run", 40, found["exit_code"] == 1 and bool(errors))


def full_store(threshold: float, folder: Path, mark: str, env: dict[str, str]) -> dict[str, Any]:
    """Fill the object store under a run.

    Args:
        threshold: Share of the disk in use beyond which Ray takes it for full.
    """
    env = env | {"RAY_local_fs_capacity_threshold": str(threshold)}
    store = f"--object-store-memory={STORE_BYTES}"
    with running_cluster(env, num_cpus=5, options=(store, NO_DASHBOARD)) as (address, _):
        env = env | {"RAY_AUTH_MODE": "disabled", "RAY_ADDRESS": address}
        steps = 40
        run = KilledRun(folder, mark, env, (*SCRIPTED, f"train.steps={steps}"))
        run.start()
        run.wait_for_step(10, _LIMIT_S)
        command = [sys.executable, "-c", HOG, address, str(STORE_BYTES)]
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen(command, env=env, text=True, **pipes) as hog:
            assert hog.stdout is not None
            said, full_at = hog.stdout.readline().strip(), len(run.times)
            code = run.end(_LIMIT_S)
            hog.kill()
    times = run.times
    errors = [line.strip() for line in run.said if line.startswith("error: ")]
    found = {"hog": said, "full_after_step": full_at, "exit_code": code, "errors": errors}
    found |= {"step_s_before": step_s(times[:full_at]), "step_s_after": step_s(times[full_at:])}
    if code:
        return found | {"ok": bool(errors), "steps": len(times), "log": run.tail}
    return found | judge(folder / "run", steps)


def over_network(
    line: dict[str, float], folder: Path, mark: str, env: dict[str, str]
) -> dict[str, Any]:
    """Have engine and train worker on two sides of a line."""
    steps = 30
    env = env | {"RAY_AUTH_MODE": "disabled", "GLOO_SOCKET_IFNAME": DEVICE}
    with contextlib.ExitStack() as stack:
        to_node = stack.enter_context(line_to_namespace(**line))
        cluster = running_cluster(env, num_cpus=CPUS_OF_NODE, address=HERE, options=(NO_DASHBOARD,))
        address, _ = stack.enter_context(cluster)
        inside = ("ip", "netns", "exec", to_node.namespace)
        node = SecondNode(address, env, num_cpus=CPUS_OF_NODE, own_address=THERE, inside=inside)
        node.start()
        node.wait_until_started()
        run = KilledRun(
            folder, mark, env | {"RAY_ADDRESS": address},
            (*SCRIPTED, f"train.steps={steps}", "train.checkpoint_every=10",
             f"rollout.engine.num_cpus_per_replica={CPUS_OF_PART}",
             f"scaling={{num_workers: 1, use_gpu: false, num_cpus_per_worker: {CPUS_OF_PART}}}"),
        )  # fmt: skip
        run.start()
        run.wait_for_step(5, _LIMIT_S)
        found: dict[str, Any] = {"over_there": node.carries()}
        before, began = to_node.num_bytes, time.monotonic()
        code = run.end(_LIMIT_S)
        found["bytes_per_s"] = round((to_node.num_bytes - before) / (time.monotonic() - began))
        found |= {"packets": to_node.num_packets, "packets_lost": to_node.num_lost}
    found |= {"exit_code": code, "step_s": step_s(run.times)}
    if code:
        return found | {"ok": False, "log": run.tail}
    return found | judge(folder / "run", steps) | {"seconds_of": spans(folder / "run")}


Case = Callable[[Path, str, dict[str, str]], dict[str, Any]]
TRIALS: dict[str, dict[str, Case]] = {
    "disk": {what: partial(full_disk, what) for what in LEFT_BYTES},
    "store": {"disk has room": partial(full_store, 1.0), "disk is full": partial(full_store, 0.0)},
    "network": {name: partial(over_network, line) for name, line in LINES.items()},
    "samples": {str(number): partial(many_samples, number) for number in SAMPLES},
}
"""The cases of each, by name."""


def one_case(case: Case) -> dict[str, Any]:
    """Do a case in a folder of its own; what became of it."""
    mark, env = marked_environment()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="load-", ignore_cleanup_errors=True) as name:
        folder = Path(name) / "runs"
        folder.mkdir()
        env |= {"RAY_TMPDIR": name, "RAY_raylet_start_wait_time_s": "240"}
        try:
            found = case(folder, mark, env)
        except (NoDiskError, NoLineError) as reason:
            return {"skipped": str(reason)}
        except (AssertionError, OSError, subprocess.TimeoutExpired) as error:
            found = {"ok": False, "error": str(error)[-4000:]}
        finally:
            left = wait_until_none(mark, 30)
            kill_all(mark)
    found |= {"seconds": round(time.monotonic() - began, 1), "date": time.strftime("%Y-%m-%d")}
    return found | ({"ok": False, "left_behind": list(left.values())} if left else {})


def main() -> int:
    """Do some trials; 0 if all that could be done ended well."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("trials", nargs="*", choices=[[], *TRIALS], metavar="TRIAL")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/load-2cpu.json"))
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what was mounted is to go
    report = json.loads(options.out.read_text()) if options.out.exists() else {}
    trials = options.trials or list(TRIALS)
    for trial in trials:
        for name, case in TRIALS[trial].items():
            found = report.setdefault(trial, {})[name] = one_case(case)
            print(json.dumps({f"{trial}, {name}": found}, indent=1), flush=True)
            options.out.write_text(json.dumps(report, indent=1) + "\n")
    cases = [found for trial in trials for found in report[trial].values()]
    return int(not all("skipped" in found or found["ok"] for found in cases))


if __name__ == "__main__":
    sys.exit(main())
