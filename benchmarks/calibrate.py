"""Measures what the simulator has to know of this machine, and asks it for the modes' ratios.

    python benchmarks/modes.py --calibrate ...

The engines of a run are measured at once, as one is slower beside others, through the same client
and Serve deployments as in a run; the trainer is read off the synchronous runs, in which it has the
machine to itself. Nothing is fitted to the ratios that are predicted.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

from cpu_time import CPUClock

from ray_apr import PartialRolloutConfig, RolloutConfig
from ray_apr.tools.simulator.cluster import ClusterConfig
from ray_apr.tools.simulator.run import Simulation
from ray_apr.tools.simulator.trace import Trace

_SHORT, _LONG = 16, 144
_TURNS = 3
"""How often each is timed; the medians count."""
_ROUNDS_BEFORE, _ROUNDS = 3, 12
"""Responses of each place in the engine until requests come and go steadily, and in all."""
_ABORT_AFTER_S = 0.15
_OTHER_SIZE = 1.5
"""Factor between the tokens of two steps that tell what one costs beside them."""
_IDLE_S = 10.0
_APP = "calibration"
_numbers = itertools.count()
"""Of all requests: a group of them in a row has a prompt of its own, which nothing has cached."""


def measure_engines(
    model: str, config: RolloutConfig, *, prompt_tokens: int, max_num_seqs: int
) -> dict[str, Any]:
    """Time all engines at several batch sizes, each with as many requests as the others.

    Returns:
        Parameters of `EngineConfig`, the raw times they come from, and the cores that Ray and the
        server use while nothing happens.
    """
    from ray_apr.serve.builder import start_rollout_servers, stop_rollout_servers
    from ray_apr.serve.spec import EngineSpec

    start_rollout_servers(_APP, EngineSpec.of_run(model, config), config)
    try:
        idle_cores = measure_idle()
        raw = asyncio.run(_measure(config, prompt_tokens, max_num_seqs))
    finally:
        stop_rollout_servers(_APP)
    return {"raw": raw, "engine": engine_parameters(raw), "idle_cores": idle_cores}


def measure_idle() -> float:
    """Cores that all processes together use while nothing happens."""
    began = time.time()
    with CPUClock() as clock:
        time.sleep(_IDLE_S)
    ended = time.time()
    return sum(clock.between(began, ended).values()) / (ended - began)


async def _measure(
    config: RolloutConfig, prompt_tokens: int, max_num_seqs: int
) -> list[dict[str, float]]:
    """A row for each size: medians of short and of long responses that begin together, and the
    cores that the engine uses with the long ones. The last one, of a full engine, also has them
    interrupted once, and responses that follow one another."""
    rows: list[dict[str, float]] = []

    async def times(size: int, tokens: int, *, interrupt: bool = False) -> list[float]:
        return [
            await _time(config, size, tokens, prompt_tokens, interrupt=interrupt)
            for _ in range(_TURNS)
        ]

    await times(max_num_seqs, _SHORT)  # warm-up
    for size in (1, max_num_seqs // 4, max_num_seqs):
        short_s = statistics.median(await times(size, _SHORT))
        long_s = statistics.median(await times(size, _LONG))
        began = time.time()
        with CPUClock() as clock:  # it delays what it watches, and what is timed is not watched
            watched = await times(size, _LONG)
        cores = clock.between(began, time.time()).get("engine", 0.0) / sum(watched)
        cores /= config.num_replicas
        rows.append({"sequences": size, "short_s": short_s, "long_s": long_s, "cores": cores})
    interrupted = await times(max_num_seqs, _LONG, interrupt=True)
    rows[-1]["interrupted_s"] = statistics.median(interrupted)
    rows[-1] |= await _steady(config, max_num_seqs, prompt_tokens)
    return rows


def engine_parameters(raw: list[dict[str, float]]) -> dict[str, Any]:
    """Parameters of `EngineConfig` from the rows of `_measure`."""
    sizes, steps_s = [row["sequences"] for row in raw], [_step_s(row) for row in raw]
    full, size = raw[-1], sizes[-1]
    per_sequence_s = max(0.0, (steps_s[-1] - steps_s[0]) / (size - 1))
    cores_per_sequence, cores = statistics.linear_regression(sizes, [row["cores"] for row in raw])
    decode_s = full["steady_tokens"] * steps_s[-1] / size
    return {
        "decode_base_s": steps_s[0] - per_sequence_s,
        "decode_per_sequence_s": per_sequence_s,
        "decode_per_context_token_s": 0.0,
        "max_sequences": int(size),
        "prefill_tokens_per_s": 1e9,
        "request_overhead_s": max(0.0, full["steady_s"] - decode_s) / full["steady_requests"],
        "resume_overhead_s": max(0.0, full["interrupted_s"] - full["long_s"]) / size,
        "cores": cores,
        "cores_per_sequence": max(0.0, cores_per_sequence),
    }


def _step_s(row: dict[str, float]) -> float:
    return (row["long_s"] - row["short_s"]) / (_LONG - _SHORT)


async def _time(
    config: RolloutConfig, size: int, tokens: int, prompt_tokens: int, *, interrupt: bool = False
) -> float:
    """Seconds of `size` requests of each engine that begin together.

    Args:
        config: Of the rollout servers.
        size: Requests of each.
        tokens: Length of each response.
        prompt_tokens: Length of each prompt.
        interrupt: Whether all requests are aborted once on their way, and resumed.
    """
    client = await _make_client(config, size * config.num_replicas)

    async def abort_once() -> None:
        await asyncio.sleep(_ABORT_AFTER_S)
        await client.abort(None)

    began = time.monotonic()
    num_calls = size * config.num_replicas
    calls = [_respond(client, config, prompt_tokens, tokens) for _ in range(num_calls)]
    await asyncio.gather(*calls, *([abort_once()] if interrupt else []))
    return time.monotonic() - began


async def _steady(config: RolloutConfig, size: int, prompt_tokens: int) -> dict[str, float]:
    """Responses of many lengths, `size` at a time in each engine, each followed by the next:
    requests and tokens that end in one, and seconds, while as many begin."""
    num_replicas = config.num_replicas
    size *= num_replicas
    client = await _make_client(config, size)
    rng = random.Random(0)
    left = iter([rng.randint(_SHORT, _LONG) for _ in range(_ROUNDS * size)])
    ended: list[tuple[float, int]] = []
    none_left: list[float] = []

    async def one_after_another() -> None:
        for length in left:
            await _respond(client, config, prompt_tokens, length)
            ended.append((time.monotonic(), length))
        none_left.append(time.monotonic())

    await asyncio.gather(*(one_after_another() for _ in range(size)))
    began, until = ended[_ROUNDS_BEFORE * size - 1][0], none_left[0]
    lengths = [length for at, length in ended if began < at <= until]
    return {
        "steady_requests": len(lengths) / num_replicas,
        "steady_tokens": sum(lengths) / num_replicas,
        "steady_s": until - began,
    }


async def _make_client(config: RolloutConfig, size: int) -> Any:
    """A client that knows the server, and gives it at most `size` requests at a time."""
    from ray_apr.serve.client import ServeRolloutClient

    client = ServeRolloutClient(_APP, config, max_inflight=size)
    await _respond(client, config, 1, 1)
    return client


async def _respond(client: Any, config: RolloutConfig, prompt_tokens: int, tokens: int) -> None:
    """One response, resumed until it has its length."""
    from ray_apr.core.messages import GenerateRequest, PromptInput, SamplingParams

    number = next(_numbers)
    name, rng = f"calibration-{number}", random.Random(number // config.group_size)
    ids = [rng.randrange(3, 12) for _ in range(prompt_tokens)]
    while (num_left := prompt_tokens + tokens - len(ids)) > 0:
        generation = await client.generate(
            GenerateRequest(
                request_id=f"{name}#{num_left}",
                session_id=name,
                prompt=PromptInput(token_ids=tuple(ids)),
                sampling=SamplingParams(temperature=1.0, ignore_eos=True),
                max_tokens=num_left,
            )
        )
        ids += [token for segment in generation.segments for token in segment.token_ids]


def measured_cluster(
    calibration: dict[str, Any], sync_runs: list[dict[str, Any]], args: argparse.Namespace
) -> ClusterConfig:
    """The simulator's machine: engines as measured, all else as in the synchronous runs.

    What neither engines nor trainer use of the host's cores is what it uses when idle, and on top
    of that the same for each sample; it counts where they share the cores.
    """
    rows = [row for run in sync_runs for row in run["steps"][1:] if "trainer_step_s" in row]
    slope, overhead = _fitted([(row["num_tokens"], row["trainer_step_s"]) for row in rows])
    syncs = [r["weight_wait_s"] for r in rows if r.get("weight_wait_s")]
    idle_cores = calibration["idle_cores"]
    num_samples = args.steps * args.batch_prompts * args.group_size
    others = [run["cpu_s"]["other"] - idle_cores * run["seconds"] for run in sync_runs]
    return ClusterConfig.from_dict(
        {
            "gpus": args.replicas + args.train_workers,
            "rollout_gpus": args.replicas,
            "host_cores": None if args.gpu else (os.cpu_count() or 1) - idle_cores,
            "engine": calibration["engine"],
            "trainer": {
                "tokens_per_s_per_gpu": 1 / (slope * sync_runs[0]["num_train_workers"]),
                "step_overhead_s": overhead,
            },
            "weight_sync_s": statistics.median(syncs),
            "reward_workers": args.reward_concurrency,
            "sample_overhead_s": 0.0
            if args.gpu
            else max(0.0, statistics.median(others)) / num_samples,
            "batch": {"prompts": args.batch_prompts, "group_size": args.group_size},
            "steps": args.steps,
        }
    )


def _fitted(points: list[tuple[int, float]]) -> tuple[float, float]:
    """Seconds of a token and of a step, of (tokens, seconds): medians, which a step that is slow
    for another reason does not move. Steps of about one size say nothing of what a step costs
    beside its tokens."""
    pairs = itertools.combinations(sorted(points), 2)
    slopes = [(t - s) / (m - n) for (n, s), (m, t) in pairs if m >= _OTHER_SIZE * n]
    slope = statistics.median(slopes or [0.0])
    overhead = statistics.median(seconds - slope * tokens for tokens, seconds in points)
    if slope > 0 and overhead > 0:
        return slope, overhead
    return statistics.median(seconds / tokens for tokens, seconds in points), 0.0


def predict(
    trace: Trace, modes: dict[str, tuple[PartialRolloutConfig, ClusterConfig]], seeds: int
) -> dict[str, dict[str, float]]:
    """Simulated seconds of each mode, and those of a step after the first; medians over seeds,
    which are those of the runs: both have the prompts in the same order."""
    found = {}
    for mode, (config, cluster) in modes.items():
        runs = [Simulation(trace, cluster, config, seed=seed).run() for seed in range(seeds)]
        found[mode] = {
            "seconds": statistics.median(run.wall_s for run in runs),
            "later_step_s": statistics.median(later_step_s(run.step_ends) for run in runs),
        }
    return found


def later_step_s(ends: Sequence[float]) -> float:
    """Seconds of a step after the first, from the times when steps have ended."""
    return (ends[-1] - ends[0]) / max(1, len(ends) - 1)
