"""One engine: its rate and what a token costs its processes, with vLLM's scheduler and with ours.

    python benchmarks/gpu.py engine --shape 0.6B --out engine.json
    python benchmarks/gpu.py engine --shape tiny --context 2048 --out engine.json  # on a CPU

Ours takes requests in together, where steps that do are dear, and hands tokens over in pieces
(ray_apr/serve/vllm/scheduler.py); "ours, at once" only the latter. "ours, one process" has the
GPU's worker in the engine core, not beside it, and "ours, few graphs" about half of the CUDA graphs
that vLLM captures. In turns, each starts an engine that generates
`--inflight` responses of one length, one response alone, then as many short ones at a time for a
while, and is interrupted in the midst of them: until `pause` returns, and until all partial
responses are there.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import os
import random
import statistics
import time
from pathlib import Path
from typing import Any

import psutil

PROMPT_TOKENS, RESPONSE_TOKENS = 64, 512
NUM_INTERRUPTIONS = 12
SHORT_TOKENS, SHORT_TURNS = 64, 16
"""Median of the short responses, and how many follow on each other."""
FEW_GRAPHS = [1, 2, 4, 8, *range(16, 256, 16), *range(256, 513, 32)]
"""Of what sizes of batches; vLLM has 51."""
VARIANTS: dict[str, dict[str, Any]] = {
    "vllm": {"scheduler_cls": None},
    "ours": {},
    "ours, at once": {"additional_config": {"ray_apr_prefill_interval_s": 0}},
    "ours, one process": {"distributed_executor_backend": "uni"},
    "ours, few graphs": {"cudagraph_capture_sizes": FEW_GRAPHS},
}


def measure_engine(model: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Rates, CPU time and interruptions of each turn, and their medians."""
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in args.variants}
    for _ in range(args.repeats):
        for name, found in turns.items():
            found.append(asyncio.run(_turn(model, args, VARIANTS[name])))
            print(name, found[-1], flush=True)
    medians = {
        name: {key: statistics.median(turn[key] for turn in found) for key in found[0]}
        for name, found in turns.items()
    }
    first = args.variants[0]
    return {
        "turns": turns,
        "medians": medians,
        f"over_{first}": {
            name: {key: value / medians[first][key] for key, value in found.items()}
            for name, found in medians.items()
        },
    }


async def _turn(model: Path, args: argparse.Namespace, variant: dict[str, Any]) -> dict[str, float]:
    engine = _make_engine(model, args, variant)
    began = time.perf_counter()
    await engine.start()
    start_s = time.perf_counter() - began
    try:
        await _generate(engine, args.inflight, 32)
        before, began = _cpu_seconds(), time.perf_counter()
        tokens = await _generate(engine, args.inflight, RESPONSE_TOKENS)
        seconds, after = time.perf_counter() - began, _cpu_seconds()
        began = time.perf_counter()
        alone = await _generate(engine, 1, RESPONSE_TOKENS) / (time.perf_counter() - began)
        short = await _steady(engine, args.inflight)
        stops = [await _interrupt(engine, args.inflight) for _ in range(NUM_INTERRUPTIONS)]
    finally:
        engine.shutdown()
    return {
        "start_s": start_s,
        "tokens_per_s": tokens / seconds,
        "alone_tokens_per_s": alone,
        "short_tokens_per_s": short,
        **{f"{p}_cpu_us_per_token": (after[p] - before[p]) / tokens * 1e6 for p in after},
        "pause_s": statistics.median(pause for pause, _ in stops),
        "handed_over_s": statistics.median(handed_over for _, handed_over in stops),
    }


def _make_engine(model: Path, args: argparse.Namespace, variant: dict[str, Any]) -> Any:
    import torch

    from ray_apr import RolloutConfig
    from ray_apr.serve.spec import EngineSpec
    from ray_apr.serve.vllm.arguments import CPU_ENVIRONMENT
    from ray_apr.serve.vllm.engine import VLLMEngine

    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        os.environ.update(CPU_ENVIRONMENT)
    config = RolloutConfig(
        engine={
            "device": "cuda" if on_gpu else "cpu",
            "dtype": "bfloat16" if on_gpu else "float32",
            "kwargs": {"max_num_seqs": args.inflight},
        }
    )
    spec = dataclasses.replace(
        EngineSpec.of_run(str(model), config, max_model_len=args.context),
        kv_cache="keep",
        engine_kwargs={**config.engine.kwargs, **variant},
    )
    return VLLMEngine(spec, "engine")


def _start(engine: Any, count: int, length: int) -> list[asyncio.Task[Any]]:
    return [asyncio.create_task(_request(engine, i, length)) for i in range(count)]


async def _request(engine: Any, index: int, length: int) -> Any:
    from ray_apr.core.messages import GenerateRequest, PromptInput, SamplingParams

    rng = random.Random(index)
    prompt = tuple(rng.randrange(3, 500) for _ in range(PROMPT_TOKENS))
    return await engine.generate(
        GenerateRequest(
            request_id=f"{time.monotonic()}-{index}",
            session_id=f"{index}",
            prompt=PromptInput(token_ids=prompt),
            sampling=SamplingParams(ignore_eos=True),
            max_tokens=length,
        )
    )


async def _generate(engine: Any, count: int, length: int) -> int:
    """Tokens of `count` responses of this length."""
    return sum(g.num_tokens for g in await asyncio.gather(*_start(engine, count, length)))


async def _steady(engine: Any, count: int) -> float:
    """Tokens per second of short responses of many lengths, `count` at a time, until the last one
    begins."""
    rng = random.Random(0)
    lengths = [rng.lognormvariate(0, 0.6) * SHORT_TOKENS for _ in range(SHORT_TURNS * count)]
    left = iter(enumerate(min(RESPONSE_TOKENS, max(4, round(n))) for n in lengths))
    tokens, began, ended = 0, time.perf_counter(), 0.0

    async def one_after_another() -> None:
        nonlocal tokens, ended
        for index, length in left:
            generation = await _request(engine, index, length)
            if not ended:
                tokens += generation.num_tokens
        ended = ended or time.perf_counter()

    await asyncio.gather(*(one_after_another() for _ in range(count)))
    return tokens / (ended - began)


async def _interrupt(engine: Any, count: int) -> tuple[float, float]:
    """Seconds until the engine is paused, and until the last partial response is there."""
    calls = _start(engine, count, RESPONSE_TOKENS)
    await asyncio.sleep(1.0)
    began = time.perf_counter()
    await engine.pause("abort")
    paused = time.perf_counter()
    await asyncio.gather(*calls)
    handed_over = time.perf_counter()
    await engine.resume()
    return paused - began, handed_over - began


def _cpu_seconds() -> dict[str, float]:
    """CPU time of this process, which serves, and of the engine core below it."""
    this = psutil.Process()
    core = [p for p in this.children(recursive=True) if "EngineCore" in " ".join(p.cmdline())]
    times = {"server": this.cpu_times(), "core": core[0].cpu_times()}
    return {part: spent.user + spent.system for part, spent in times.items()}
