"""What a reward costs beside itself: a call of the actor each, and calls of a moment together.

    python benchmarks/reward_calls.py --out benchmarks/results/reward-calls-2cpu.json

One caller scores samples with a reward that returns at once, on one `RewardWorker`, as many at a
time as `rollout.reward.concurrency` lets, in both ways in turns. The CPU time is that of the
caller's and of the worker's process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from pathlib import Path
from typing import Any

import psutil
from host import describe_call, package_versions, ray_environment

ROOT = Path(__file__).resolve().parents[1]
TOKENS = 200
LIMIT_S = 60.0
WAYS = ("alone", "together")


def main() -> None:
    """Measure, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--samples", type=int, default=4000, help="of each turn")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    import ray

    ray.init(num_cpus=2, runtime_env=ray_environment(), log_to_driver=False)
    rows = asyncio.run(measure(args))
    found = {
        way: {
            name: statistics.median(row[name] for row in rows if row["way"] == way)
            for name in ("caller_ms", "worker_ms", "wall_ms")
        }
        for way in WAYS
    }
    result = {**describe_call(), "versions": package_versions(), "rows": rows, "medians": found}
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(found, indent=1))
    ray.shutdown()


async def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each turn: milliseconds of a sample."""
    import ray

    from ray_apr.rollout.calls import Calls
    from ray_apr.rollout.scoring import RewardWorker

    class Worker(RewardWorker):
        def pid(self) -> int:
            import os

            return os.getpid()

    reward = lambda sample: float(len(sample.response_text))  # noqa: E731  (travels by value)
    worker: Any = ray.remote(num_cpus=1, max_concurrency=64)(Worker).remote(reward, 16)
    process = psutil.Process(await worker.pid.remote())
    calls, sample = Calls(worker), make_sample()
    ways = {
        "alone": lambda: worker.call.remote("score", sample, LIMIT_S),
        "together": lambda: calls.make("score", sample, LIMIT_S),
    }
    rows = []
    for repeat in range(-1, args.repeats):
        for way, score in ways.items():
            slots = asyncio.Semaphore(args.concurrency)

            async def one(slots: asyncio.Semaphore = slots, score: Any = score) -> None:
                async with slots:
                    assert (await score()).reward == 2 * TOKENS

            own, theirs, began = time.process_time(), cpu_s(process), time.perf_counter()
            await asyncio.gather(*(one() for _ in range(args.samples)))
            took = time.perf_counter() - began
            row = {
                "caller_ms": (time.process_time() - own) / args.samples * 1e3,
                "worker_ms": (cpu_s(process) - theirs) / args.samples * 1e3,
                "wall_ms": took / args.samples * 1e3,
            }
            if repeat >= 0:
                rows.append({"way": way, "repeat": repeat, **row})
    return rows


def cpu_s(process: psutil.Process) -> float:
    """CPU seconds of a process so far."""
    times = process.cpu_times()
    return float(times.user + times.system)


def make_sample() -> Any:
    """A finished sample."""
    from ray_apr.core.sample import FinishReason, Prompt, Sample, Segment

    ids = tuple(range(TOKENS))
    return Sample(
        sample_id="g0-0",
        group_id="g0",
        prompt=Prompt(prompt_id="g0", token_ids=ids, row={"answer": "7"}),
        max_response_tokens=TOKENS,
        segments=(Segment(token_ids=ids, logprobs=(-0.5,) * TOKENS, policy_version=0),),
        finish_reason=FinishReason.STOP,
        response_text="7 " * TOKENS,
    )


if __name__ == "__main__":
    main()
