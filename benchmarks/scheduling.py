"""What it costs to schedule a token, with vLLM's scheduler and with ours.

    python benchmarks/scheduling.py --out scheduling.json

A scheduler makes the steps of `--inflight` requests that decode, one ahead as on a GPU, without a
model: CPU time for a token, of choosing the steps and of taking their tokens in. "ours, each token
looked at" asks vLLM's KV cache manager for each of them, as vLLM does
(ray_apr/serve/vllm/blocks.py). The variants run in turns, each in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import host

from tests.tiny_model import make_tiny_model

VARIANTS = ("vllm", "ours, each token looked at", "ours")
PROMPT_TOKENS, RESPONSE_TOKENS, FIRST_STEPS, STEPS = 64, 512, 40, 400


def main() -> None:
    """Run all turns, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--inflight", type=int, default=256)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", choices=VARIANTS, help="one turn, in this process")
    args = parser.parse_args()
    if args.only:
        sys.stdout.write(json.dumps(one_turn(args.only, args.inflight)) + "\n")
        return
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in VARIANTS}
    for _ in range(args.turns):
        for name, found in turns.items():
            command = [sys.executable, __file__, f"--inflight={args.inflight}", f"--only={name}"]
            said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
            found.append(json.loads(said.stdout.splitlines()[-1]))
    medians = {
        name: {key: statistics.median(turn[key] for turn in found) for key in found[0]}
        for name, found in turns.items()
    }
    about = {**host.describe_call(), "versions": host.package_versions()}
    result = {**about, "inflight": args.inflight, "turns": turns, "medians": medians}
    for name, found in medians.items():
        sys.stdout.write(f"{name}: {json.dumps(found)}\n")
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


def one_turn(variant: str, num_requests: int) -> dict[str, float]:
    """Microseconds of CPU time for a token."""
    from tests.vllm.schedulers import made_tokens, real_request, real_scheduler

    with tempfile.TemporaryDirectory() as folder:
        scheduler = real_scheduler(
            maker(variant), make_tiny_model(Path(folder)), num_blocks=200 * num_requests,
            max_num_seqs=num_requests, max_model_len=1024, max_num_batched_tokens=8192,
        )  # fmt: skip
    requests = {}
    for number in range(num_requests):
        prompt = [3 + (number + place) % 37 for place in range(PROMPT_TOKENS)]
        requests[f"{number}"] = real_request(f"{number}", prompt, RESPONSE_TOKENS)
        scheduler.add_request(requests[f"{number}"])
    ahead, spent, tokens = [scheduler.schedule()], {"schedule": 0.0, "update": 0.0}, 0
    for number in range(FIRST_STEPS + STEPS):
        if number == FIRST_STEPS:
            spent, tokens = dict.fromkeys(spent, 0.0), 0
        began = time.process_time()
        ahead.append(scheduler.schedule())
        scheduled = time.process_time()
        step = ahead.pop(0)
        made = made_tokens(step, requests, 5)
        taken = time.process_time()
        scheduler.update_from_output(step, made)
        spent["schedule"] += scheduled - began
        spent["update"] += time.process_time() - taken
        tokens += step.total_num_scheduled_tokens
    us = {part: seconds / tokens * 1e6 for part, seconds in spent.items()}
    return {**us, "us_per_token": sum(us.values())}


def maker(variant: str) -> Callable[..., Any]:
    """What makes the scheduler of a variant."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    from ray_apr.serve.vllm import scheduler as ours

    if variant == "vllm":
        return AsyncScheduler
    if variant != "ours":
        ours.look_at_ends_only = lambda manager: False
    return ours.make_scheduler


if __name__ == "__main__":
    main()
