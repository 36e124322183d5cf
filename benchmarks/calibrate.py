"""Measures what the simulator has to know of this machine, and asks it for the modes' ratios.

    python benchmarks/modes.py --calibrate ...

The engines are measured alone, through the same client and Serve deployment as in a run; the
trainer is read off the synchronous runs, in which it has the machine to itself. Nothing is fitted
to the ratios that are predicted.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import statistics
import time
from typing import Any

from cpu_time import CPUClock

from ray_apr import PartialRolloutConfig, RolloutConfig
from ray_apr.simulator.cluster import ClusterConfig
from ray_apr.simulator.run import Simulation
from ray_apr.simulator.trace import Trace

_SHORT, _LONG = 16, 144
_ABORT_AFTER_S = 0.15
_IDLE_S = 10.0
_APP = "calibration"


def measure_engines(
    model: str, config: RolloutConfig, *, prompt_tokens: int, max_num_seqs: int
) -> dict[str, Any]:
    """Time decode steps of one engine, and of all at once, at several batch sizes.

    Returns:
        Parameters of `EngineConfig`, the raw times they come from, and the cores that Ray and the
        servers use while nothing happens.
    """
    from ray_apr.serve.builder import start_rollout_servers, stop_rollout_servers
    from ray_apr.serve.client import ServeRolloutClient

    start_rollout_servers(_APP, model=model, config=config)
    try:
        client = ServeRolloutClient(_APP, config, max_inflight=4 * max_num_seqs)
        idle_cores = measure_idle()
        cores = (os.cpu_count() or 1) - idle_cores
        found = asyncio.run(_measure(client, config, prompt_tokens, max_num_seqs, cores))
        return {**found, "idle_cores": idle_cores}
    finally:
        stop_rollout_servers(_APP)


def measure_idle() -> float:
    """Cores that all processes together use while nothing happens."""
    with CPUClock() as clock:
        began = time.time()
        time.sleep(_IDLE_S)
        ended = time.time()
    return sum(clock.between(began, ended).values()) / (ended - began)


async def _measure(
    client: Any, config: RolloutConfig, prompt_tokens: int, max_num_seqs: int, host_cores: float
) -> dict[str, Any]:
    sizes = [1, max_num_seqs // 4, max_num_seqs]
    raw: list[dict[str, Any]] = []
    await _time(client, config, 1, max_num_seqs, _SHORT, prompt_tokens)  # warm-up
    for engines in sorted({1, config.num_replicas}):
        for size in sizes:
            short, long = [
                await _time(client, config, engines, size, tokens, prompt_tokens)
                for tokens in (_SHORT, _LONG)
            ]
            step_s = (long - short) / (_LONG - _SHORT)
            overhead_s = max(0.0, short - _SHORT * step_s) / size
            row = {"engines": engines, "sequences": size, "step_s": step_s, "long_s": long}
            raw.append({**row, "request_overhead_s": overhead_s})
    alone = {r["sequences"]: r for r in raw if r["engines"] == 1}
    per_sequence = (alone[sizes[-1]]["step_s"] - alone[1]["step_s"]) / (sizes[-1] - 1)
    together = [r for r in raw if r["engines"] == config.num_replicas]
    share = host_cores / config.num_replicas
    wanted = [share * max(1.0, r["step_s"] / alone[r["sequences"]]["step_s"]) for r in together]
    cores_per_sequence, cores = statistics.linear_regression(sizes, wanted)
    whole = alone[sizes[-1]]
    again = await _time(client, config, 1, max_num_seqs, _LONG, prompt_tokens, interrupt=True)
    raw.append({"engines": 1, "sequences": max_num_seqs, "interrupted_s": again})
    return {
        "raw": raw,
        "engine": {
            "decode_base_s": alone[1]["step_s"] - per_sequence,
            "decode_per_sequence_s": max(0.0, per_sequence),
            "decode_per_context_token_s": 0.0,
            "max_sequences": max_num_seqs,
            "prefill_tokens_per_s": 1e9,
            "request_overhead_s": whole["request_overhead_s"],
            "resume_overhead_s": max(0.0, again - whole["long_s"]) / max_num_seqs,
            "cores": cores,
            "cores_per_sequence": max(0.0, cores_per_sequence),
        },
    }


async def _time(
    client: Any,
    config: RolloutConfig,
    engines: int,
    size: int,
    tokens: int,
    prompt_tokens: int,
    *,
    interrupt: bool = False,
) -> float:
    """Seconds of `size` requests on each of some engines; a session stays on its engine.

    Args:
        client: Of the rollout servers.
        config: Of the rollout servers.
        engines: How many of them are used.
        size: Requests for each.
        tokens: Length of each response.
        prompt_tokens: Length of each prompt.
        interrupt: Whether all requests are aborted once on their way, and resumed.
    """
    from ray_apr.types import SamplingParams

    sampling = SamplingParams(temperature=1.0, ignore_eos=True)
    began = time.monotonic()

    async def respond(engine: int, index: int) -> None:
        ids = [3 + (index + j) % 10 for j in range(prompt_tokens)]
        while (num_left := prompt_tokens + tokens - len(ids)) > 0:
            generation = await client.generate(
                request_id=f"{began}-{engine}-{index}#{num_left}",
                session_id=f"{began}-{engine}",
                token_ids=ids,
                sampling=sampling,
                max_tokens=num_left,
            )
            ids += [token for segment in generation.segments for token in segment.token_ids]

    async def abort_once() -> None:
        await asyncio.sleep(_ABORT_AFTER_S)
        await client.abort(None)

    calls = [respond(engine, index) for engine in range(engines) for index in range(size)]
    await asyncio.gather(*calls, *([abort_once()] if interrupt else []))
    return time.monotonic() - began


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
    for another reason does not move."""
    slopes = [(t - s) / (m - n) for (n, s), (m, t) in itertools.combinations(points, 2) if n != m]
    slope = statistics.median(slopes)
    overhead = statistics.median(seconds - slope * tokens for tokens, seconds in points)
    if slope > 0 and overhead > 0:
        return slope, overhead
    return statistics.median(seconds / tokens for tokens, seconds in points), 0.0


def predict(
    trace: Trace, modes: dict[str, tuple[PartialRolloutConfig, ClusterConfig]], seeds: int
) -> dict[str, float]:
    """Simulated time of "sync" over that of each mode; medians over seeds, which are those of the
    runs: both have the prompts in the same order."""
    times = {
        mode: statistics.median(
            Simulation(trace, cluster, config, seed=seed).run().wall_s for seed in range(seeds)
        )
        for mode, (config, cluster) in modes.items()
    }
    return {mode: times["sync"] / seconds for mode, seconds in times.items()}
