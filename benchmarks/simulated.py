"""What the simulator says of every mode, bound and trace, and what it costs to ask.

    python benchmarks/simulated.py --cluster cluster.json --out results.json traces/*.jsonl.gz

Runs one process a core. The synchronous baseline is colocated on all GPUs; every other mode gets
the best split of the same GPUs. The last part simulates a million samples on 4,096 engines, and
measures a scheduling decision with 10^2 to 10^5 samples alive.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
import platform
import resource
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ray_apr.config import PartialRolloutConfig
from ray_apr.core.messages import Generation
from ray_apr.core.sample import FinishReason, Prompt, Segment
from ray_apr.scheduling.scheduler import Scheduler
from ray_apr.tools.simulator.advice import tuning_to_dict
from ray_apr.tools.simulator.cluster import ClusterConfig
from ray_apr.tools.simulator.run import Simulation
from ray_apr.tools.simulator.study import study
from ray_apr.tools.simulator.trace import Trace
from ray_apr.tools.simulator.tuner import Tuner

MODES = ("sync", "one_step_off", "stream", "async", "in_flight", "apr")
BOUNDS = (1, 2, 4, 8, 16)


def main() -> None:
    """Run all cases and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--cluster", required=True, type=Path)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--no-bounds", action="store_true", help="leave out the staleness bounds")
    parser.add_argument("--no-tune", action="store_true", help="leave out the tuner")
    parser.add_argument("--no-scale", action="store_true", help="leave out the million samples")
    args = parser.parse_args()
    cases: list[tuple[str, str, dict[str, Any]]] = []
    for trace in map(str, args.traces):
        cases += [("mode", trace, {"mode": mode}) for mode in args.modes]
        cases += [
            ("bound", trace, {"mode": "apr", "max_staleness": n, "on_stale": on_stale})
            for n in (() if args.no_bounds else BOUNDS)
            for on_stale in ("mask", "wait")
        ]
        cases += [] if args.no_tune else [("tune", trace, {})]
    if not args.no_scale:
        cases = [("scale", str(args.traces[0]), {}), ("decision", "", {}), *cases]
    work = [(kind, trace, values, str(args.cluster)) for kind, trace, values in cases]
    began = time.time()
    with multiprocessing.Pool(maxtasksperchild=1) as pool:
        rows = pool.starmap(one_case, work, chunksize=1)
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": {"cpus": os.cpu_count(), "python": platform.python_version()},
        "cluster": json.loads(args.cluster.read_text()),
        "seconds": time.time() - began,
        "rows": rows,
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    for row in rows:
        print(json.dumps({k: v for k, v in row.items() if not isinstance(v, list | dict)}))


def one_case(kind: str, trace: str, values: Mapping[str, Any], cluster: str) -> dict[str, Any]:
    """One row of the result."""
    began = time.process_time()
    machine = ClusterConfig.from_file(cluster)
    if kind == "decision":
        row: dict[str, Any] = {
            "microseconds": {n: decision_us(n) for n in (100, 1000, 10_000, 100_000)}
        }
    elif kind == "scale":
        row = million(trace, machine)
    elif kind == "tune":
        row = tuning_to_dict(Tuner(Trace.from_file(trace), machine).run())
    else:
        overrides = {key: value for key, value in values.items() if key != "mode"}
        config = PartialRolloutConfig.preset(values["mode"], **overrides)
        if config.mode == "sync":
            machine = dataclasses.replace(machine, placement="colocated", rollout_gpus=None)
        row = study(Trace.from_file(trace), machine, config).to_dict()
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "kind": kind,
        "trace": Path(trace).name.partition(".")[0],
        **values,
        **row,
        "cpu_s": time.process_time() - began,
        "peak_gib": usage.ru_maxrss / 2**20,
    }


def million(trace: str, machine: ClusterConfig) -> dict[str, Any]:
    """A million samples on 4,096 engines, with the preset apr."""
    big = dataclasses.replace(
        machine,
        placement="disaggregated",
        gpus=6144,
        rollout_gpus=4096,
        batch=dataclasses.replace(machine.batch, prompts=4096, group_size=8),
        steps=31,
    )
    out = Simulation(Trace.from_file(trace), big, PartialRolloutConfig.preset("apr")).run()
    return {
        "samples": big.steps * big.batch.size,
        "events": out.num_events,
        "ledger_error": out.ledger.error,
        "staleness_max": out.staleness_max,
    }


def decision_us(num_alive: int) -> float:
    """Microseconds of one interruption and the tick after it with this many samples alive."""
    config = PartialRolloutConfig.preset("apr", max_live_batches=None)
    groups, num_alive = num_alive // 8, num_alive // 8 * 8
    scheduler = Scheduler(
        config,
        batch_size=num_alive,
        group_size=8,
        max_inflight=num_alive // 2,
        budgets=lambda prompt: (1 << 20,),
    )
    for number in range(groups):
        scheduler.admit(Prompt(prompt_id=f"g{number}", token_ids=(1,)))
    begun = list(scheduler.tick(lambda: None).start)
    token = Segment(policy_version=0, token_ids=(1,), logprobs=(0.0,))
    nothing = Generation(request_id="", segments=(), finish_reason=FinishReason.ABORT)
    one = dataclasses.replace(nothing, segments=(token,))
    for live in begun:
        scheduler.on_generation(live, one)
    begun = list(scheduler.tick(lambda: None).start)
    repeats, began = 2000, time.perf_counter()
    for turn in range(repeats):
        scheduler.on_generation(begun[turn % len(begun)], nothing)
        (begun[turn % len(begun)],) = scheduler.tick(lambda: None).start
    return (time.perf_counter() - began) / repeats * 1e6


if __name__ == "__main__":
    main()
