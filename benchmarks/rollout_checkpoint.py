"""A checkpoint of the rollout side: what it costs, and how long it holds up the event loop.

    python benchmarks/rollout_checkpoint.py --out results/rollout-checkpoint-2cpu.json

The scheduler holds `--samples` interrupted samples of `--tokens` tokens each. A checkpoint of it is
taken beside an event loop that looks at the clock every few milliseconds, as that of the rollout
worker does other things: the longest time that it could not is "held up". Then the table is written
as the trainer writes it; the last one is read again, and given to a new scheduler. The first turn
touches memory that this process never had, which is slow on virtual machines: it is shown apart.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
from host import describe_call, package_versions

from ray_apr.config import PartialRolloutConfig
from ray_apr.core.messages import Generation
from ray_apr.core.sample import FinishReason, Prompt, Segment
from ray_apr.data.saved_samples import groups_of, read_samples, samples_table, write_samples
from ray_apr.scheduling.intake import SchedulerState
from ray_apr.scheduling.scheduler import Scheduler

GROUP_SIZE = 8
LOOK_EVERY_S = 0.002


def main() -> None:
    """Measure, print and write it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--samples", type=int, default=8192)
    parser.add_argument("--tokens", type=int, default=8192, help="of each sample")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    scheduler = make_scheduler(args.samples, args.tokens)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "samples.arrow"
        first, *turns = [asyncio.run(measure(scheduler, file)) for _ in range(1 + args.repeats)]
        digest, data = (
            write_samples(file, samples_table(scheduler.state().groups)),
            file.read_bytes(),
        )
    restore_s = restore(data, digest, args)
    found = {
        **describe_call(),
        "versions": package_versions(),
        "settings": {"samples": args.samples, "tokens": args.tokens, "group_size": GROUP_SIZE},
        "first": first,
        "turns": turns,
        "restore_s": restore_s,
        "bytes": len(data),
        "medians": {key: statistics.median(turn[key] for turn in turns) for key in turns[0]},
    }
    print(json.dumps({key: found[key] for key in ("first", "medians", "restore_s")}, indent=1))
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=1) + "\n")


def make_scheduler(num_samples: int, num_tokens: int) -> Scheduler:
    """A scheduler with so many interrupted samples."""
    scheduler = Scheduler(
        PartialRolloutConfig(max_staleness=1, oversampling_factor=1.0, max_inflight=None),
        batch_size=num_samples,
        group_size=GROUP_SIZE,
        max_inflight=num_samples,
        budgets=lambda prompt: [2 * num_tokens],
    )
    rng = random.Random(0)
    names = iter(range(num_samples))
    actions = scheduler.tick(lambda: _prompt(f"e0-{next(names)}"))
    assert len(actions.start) == num_samples, len(actions.start)
    for live in actions.start:
        ids = tuple(rng.choices(range(150_000), k=num_tokens))
        part = Segment(
            policy_version=0,
            token_ids=ids,
            logprobs=tuple(rng.random() - 1.0 for _ in ids),
        )
        scheduler.on_generation(
            live,
            Generation(request_id="r", segments=(part,), finish_reason=FinishReason.ABORT),
        )
    return scheduler


def _prompt(name: str) -> Prompt:
    return Prompt(prompt_id=name, token_ids=tuple(range(64)))


async def measure(scheduler: Scheduler, file: Path) -> dict[str, float]:
    """Take one checkpoint; returns the seconds of its parts."""
    looking = asyncio.create_task(longest_gap())
    await asyncio.sleep(0.1)
    began = time.perf_counter()
    state = scheduler.state()
    looked_at = time.perf_counter()
    table = await asyncio.to_thread(samples_table, state.groups)
    laid_out = time.perf_counter()
    await asyncio.sleep(0.01)
    looking.cancel()
    held_up = await looking
    begin_write = time.perf_counter()
    write_samples(file, table)
    written = time.perf_counter()
    return {
        "look_s": looked_at - began,
        "lay_out_s": laid_out - looked_at,
        "held_up_s": held_up,
        "write_s": written - begin_write,
    }


async def longest_gap() -> float:
    """Longest time in which the event loop did not come round, until cancelled."""
    longest, last = 0.0, time.perf_counter()
    try:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            now = time.perf_counter()
            longest, last = max(longest, now - last - LOOK_EVERY_S), now
    except asyncio.CancelledError:
        return longest


def restore(data: bytes, digest: str, args: argparse.Namespace) -> float:
    """Give what was written to a new scheduler; returns the seconds."""
    began = time.perf_counter()
    table: pa.Table = read_samples(data, digest)
    live, handed_over = groups_of(table, _prompt)
    scheduler: Any = Scheduler(
        PartialRolloutConfig(max_staleness=1, oversampling_factor=1.0, max_inflight=None),
        batch_size=args.samples,
        group_size=GROUP_SIZE,
        max_inflight=args.samples,
        budgets=lambda prompt: [2 * args.tokens],
    )
    state = SchedulerState(groups=tuple(live), handed_over=tuple(handed_over))
    scheduler.restore(state, _prompt)
    assert scheduler.counts().interrupted == args.samples
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
