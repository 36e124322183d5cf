"""Weight sync on GPUs: from a trainer on one to engines on the others, while they generate.

    python benchmarks/gpu.py sync --shape 4B --gpus 2 --out sync.json

First torch.distributed broadcasts as many bytes between bare processes on the same GPUs: the raw
figure. Then a trainer (`make_sender`, `RunControl`) syncs to rollout servers with CUDA graphs that
keep `--inflight` requests each under way. Every sync sends other random weights; afterwards the
servers' log-probs of a greedy response must be those of the trainer's model.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import itertools
import json
import os
import random
import re
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from host import free_port, ray_environment

APP = "sync-benchmark"
PROMPT_TOKENS, RESPONSE_TOKENS, CHECKED_TOKENS = 64, 1024, 32
NUM_CHECKED = 8
MODES = ("abort", "keep")
TIMEOUT_S = 120.0
STOPPED = r"generation stopped for ([\d.]+) ms"
"""What an engine core logs, from its last step before a pause to the first one after it."""


def _spec(model: str, config: Any, context: int) -> Any:
    from ray_apr import PartialRolloutConfig
    from ray_apr.serve.spec import EngineSpec

    return EngineSpec.of_run(model, config, PartialRolloutConfig(), max_model_len=context)


def measure_sync(model: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Time raw broadcasts, then syncs; returns times and log-prob gaps of each."""
    os.environ["VLLM_LOGGING_LEVEL"] = "INFO"  # the receivers tell when they are done
    raw = raw_broadcast(model, args)
    import ray
    import torch

    from ray_apr import RolloutConfig
    from ray_apr.serve.builder import start_rollout_servers, stop_rollout_servers

    ray.init(namespace="apr-benchmark", runtime_env=ray_environment(), log_to_driver=False)
    on_gpu = torch.cuda.is_available()
    num_workers = args.gpus - 1
    config = RolloutConfig(
        num_replicas=num_workers // args.tensor_parallel,
        max_response_tokens=RESPONSE_TOKENS,
        engine={
            "tensor_parallel_size": args.tensor_parallel,
            "device": "cuda" if on_gpu else "cpu",
            "dtype": "bfloat16" if on_gpu else "float32",
            "start_timeout_s": 240.0,
            "kwargs": {
                "max_num_seqs": args.inflight + NUM_CHECKED,
                **({"gpu_memory_utilization": 0.8} if on_gpu else {}),
            },
        },
    )
    try:
        start_rollout_servers(APP, _spec(str(model), config, args.context), config)
        say("servers run")
        driver = ray.remote(Driver).options(max_concurrency=10_000).remote(config)
        trainer = (
            ray.remote(Trainer).options(num_gpus=int(on_gpu)).remote(str(model), args.bucket_mb)
        )
        began = time.perf_counter()
        ray.get(trainer.connect.remote(driver), timeout=TIMEOUT_S)
        connect_s = time.perf_counter() - began
        say(f"connected in {connect_s:.2f} s")
        responses = ray.get(driver.greedy.remote(), timeout=TIMEOUT_S)
        before = ray.get(trainer.check.remote(responses), timeout=TIMEOUT_S)
        num_requests = args.inflight * config.num_replicas
        ray.get(driver.start_load.remote(num_requests, args.inflight), timeout=TIMEOUT_S)
        say("load runs")
        syncs = []
        for version in range(1, args.repeats * len(MODES) + 2):
            time.sleep(2.0)  # all requests are under way again
            mode = MODES[version % len(MODES)]
            ray.get(driver.set_mode.remote(mode), timeout=TIMEOUT_S)
            row = ray.get(trainer.sync.remote(version), timeout=TIMEOUT_S)
            responses = ray.get(driver.greedy.remote(), timeout=TIMEOUT_S)
            gap = ray.get(trainer.check.remote(responses), timeout=TIMEOUT_S)
            syncs.append({"mode": mode, **row, **gap})
            say(json.dumps(syncs[-1]))
        load_ms = logged(r"bytes of weights: loaded ([\d.]+) ms")
        add_core_stops(syncs)
        return {
            "raw": raw,
            "connect_s": connect_s,
            "log_prob_gap_before": before,
            "syncs": syncs,
            "worker_load_ms": load_ms,
            "summary": summary(raw, syncs) | {"worker": worker_summary(raw, load_ms)},
        }
    finally:
        stop_rollout_servers(APP)
        ray.shutdown()


def say(text: str) -> None:
    """Show progress."""
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def summary(raw: dict[str, Any], syncs: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians by mode, without the first sync, which records what later ones replay."""
    found: dict[str, Any] = {}
    for mode in MODES:
        rows = [row for row in syncs[1:] if row["mode"] == mode]
        names = ("gather_s", "send_s", "pause_s", "receive_s", "resume_s", "stopped_s")
        names += ("stopped_in_core_s",) if "stopped_in_core_s" in rows[-1] else ()
        found[mode] = {name: statistics.median(row[name] for row in rows) for name in names}
        found[mode]["raw_over_send"] = raw["median_s"] / found[mode]["send_s"]
        found[mode]["log_prob_gap"] = max(row["mean_gap"] for row in rows)
    return found


def add_core_stops(syncs: list[dict[str, Any]]) -> None:
    """Add what an engine core logged of each sync, where it logged one line of each."""
    stops_ms = logged(STOPPED)
    if len(stops_ms) == len(syncs):
        for row, stopped_ms in zip(syncs, stops_ms, strict=True):
            row["stopped_in_core_s"] = stopped_ms / 1e3


def logged(pattern: str) -> list[float]:
    """What one replica's processes logged of each sync."""
    logs = Path(tempfile.gettempdir(), "ray/session_latest/logs").glob("worker-*.*")
    found = [re.findall(pattern, path.read_text(errors="ignore")) for path in logs]
    return [float(number) for number in max(found, key=len, default=[])]


def worker_summary(raw: dict[str, Any], load_ms: list[float]) -> dict[str, float]:
    """Receiving and loading in the worker against the raw broadcast.

    The first sync records the copies and the second one loads their kernels: they are left out.
    """
    if len(load_ms) < 3:
        return {}
    rest_s = statistics.median(load_ms[2:]) / 1e3
    first = raw["first_bucket_bytes"] / raw["bytes"]
    return {
        "receive_and_load_over_raw": rest_s / raw["median_s"] + first,
        "broadcast_rate_over_raw": (1 - first) * raw["median_s"] / rest_s,
    }


# -- the raw figure --------------------------------------------------------------------------------


def raw_broadcast(model: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Seconds in which torch.distributed broadcasts the model's bytes, in the same buckets."""
    import torch.multiprocessing as mp

    sizes = bucket_sizes(model, args.bucket_mb)
    queue = mp.get_context("spawn").SimpleQueue()
    mp.spawn(_broadcast, (args.gpus, free_port(), sizes, queue), nprocs=args.gpus)
    seconds = queue.get()
    return {
        "bytes": sum(sizes),
        "first_bucket_bytes": sizes[0],
        "seconds": seconds,
        "median_s": statistics.median(seconds),
    }


def bucket_sizes(model: Path, bucket_mb: float) -> list[int]:
    """Bytes of each broadcast of a sync."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from ray_apr.weights.gathered import GatheredWeights
    from ray_apr.weights.plan import plan_buckets

    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    params = GatheredWeights(empty, bucket_mb=bucket_mb, wire_dtype=dtype).params
    return [bucket.num_bytes for bucket in plan_buckets(params, int(bucket_mb * 2**20))]


def _broadcast(rank: int, world_size: int, port: int, sizes: list[int], queue: Any) -> None:
    import torch
    import torch.distributed as dist

    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    synchronize = torch.cuda.synchronize if device.type == "cuda" else dist.barrier
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    buffers = [torch.ones(size, dtype=torch.uint8, device=device) for size in sizes]
    seconds = []
    for _ in range(13):
        dist.barrier()
        synchronize()
        began = time.perf_counter()
        for buffer in buffers:
            dist.broadcast(buffer, 0)
        synchronize()
        seconds.append(time.perf_counter() - began)
    if rank == 0:
        queue.put(seconds[3:])
    dist.barrier()
    dist.destroy_process_group()


# -- the parts -------------------------------------------------------------------------------------


class Trainer:
    """The trainer's side of a sync, without a training."""

    def __init__(self, model: str, bucket_mb: float) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        from ray_apr.weights.gathered import GatheredWeights
        from ray_apr.weights.transports import make_sender

        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        dtype = torch.bfloat16 if self._device == "cuda" else torch.float32
        self._model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
        self._model.to(self._device)
        weights = GatheredWeights(self._model, bucket_mb=bucket_mb)
        self._sender = make_sender("auto", weights, shares_device=False)

    def connect(self, driver: Any) -> None:
        """Form the group."""
        from ray_apr.train.control import RunControl
        from tests.fakes import FixedPart

        self._control = RunControl(
            buffer=None, worker=FixedPart(driver), recorder=None, sync_timeout_s=TIMEOUT_S
        )
        self._control.connect(self._sender, timeout_s=TIMEOUT_S)

    def sync(self, version: int) -> dict[str, float]:
        """Draw new weights, and send them."""
        import torch

        generator = torch.Generator(self._device).manual_seed(version)
        with torch.no_grad():
            for parameter in self._model.parameters():
                if parameter.ndim > 1:
                    parameter.normal_(std=0.03, generator=generator)
        if self._device == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        self._sender.gather()
        gathered = time.perf_counter()
        deliver, times = self._sender.deliver, {}

        def timed_send() -> None:
            started = time.perf_counter()
            deliver()
            times["send_s"] = time.perf_counter() - started

        self._sender.deliver = timed_send  # type: ignore[method-assign]
        times |= self._control.broadcast(self._sender, version)
        self._sender.deliver = deliver  # type: ignore[method-assign]
        return {"gather_s": gathered - began, **times}

    def check(self, responses: list[tuple[list[int], list[float]]]) -> dict[str, float]:
        """Gap between the servers' log-probs and those of this model."""
        import torch

        gaps = []
        with torch.no_grad():
            for ids, theirs in responses:
                logits = self._model(torch.tensor([ids], device=self._device)).logits[0].float()
                scored = torch.tensor(ids[-len(theirs) :], device=self._device)
                ours = logits[-len(theirs) - 1 : -1].log_softmax(-1).gather(1, scored[:, None])
                gaps.append((ours[:, 0].cpu() - torch.tensor(theirs)).abs())
        gap = torch.cat(gaps)
        return {"mean_gap": gap.mean().item(), "max_gap": gap.max().item()}


class Driver:
    """Requests under way, and the control side of a sync."""

    def __init__(self, config: Any) -> None:
        from ray_apr.serve.client import ServeRolloutClient
        from ray_apr.weights.sync import WeightSync

        self._client = ServeRolloutClient(APP, config, max_inflight=10_000)
        self._syncs = {
            mode: WeightSync(self._client, pause_mode=mode, timeout_s=TIMEOUT_S) for mode in MODES
        }
        self._mode = MODES[0]
        self._tasks: list[asyncio.Task[None]] = []
        self._rng = random.Random(0)

    async def set_mode(self, mode: Any) -> None:
        """How the next syncs pause."""
        self._mode = mode

    async def start_load(self, num_requests: int, per_replica: int) -> None:
        """Keep requests under way from now on."""
        self._tasks = [asyncio.create_task(self._request(i)) for i in range(num_requests)]
        while min(s.num_running for s in await self._client.status(drain=False)) < per_replica:  # noqa: ASYNC110  (servers tell nobody)
            await asyncio.sleep(0.1)

    async def _request(self, index: int) -> None:
        """One sample after the other; a call that is interrupted is followed by one that goes on
        with its tokens."""
        from ray_apr.core.messages import GenerateRequest, SamplingParams
        from ray_apr.core.sample import Prompt, Sample

        sampling = SamplingParams(ignore_eos=True)
        for turn in itertools.count():
            name = f"{index}-{turn}"
            sample = Sample(
                sample_id=name,
                group_id=name,
                prompt=Prompt(prompt_id=name, token_ids=tuple(self._prompt())),
                max_response_tokens=self._rng.randrange(RESPONSE_TOKENS // 4, RESPONSE_TOKENS),
            )
            for call in itertools.count():
                request = GenerateRequest.of_sample(sample, sampling, number=call)
                sample = sample.append(await self._client.generate(request))
                if sample.finish_reason is not None:
                    break

    def _prompt(self) -> list[int]:
        return [self._rng.randrange(3, 500) for _ in range(PROMPT_TOKENS)]

    async def greedy(self) -> list[tuple[list[int], list[float]]]:
        """Prompt + response and its log-probs, of a few greedy requests."""
        from ray_apr.core.messages import GenerateRequest, PromptInput, SamplingParams

        async def one(index: int) -> tuple[list[int], list[float]]:
            prompt = self._prompt()
            generation = await self._client.generate(
                GenerateRequest(
                    request_id=f"check-{time.monotonic()}-{index}",
                    session_id=f"check-{index}",
                    prompt=PromptInput(token_ids=tuple(prompt)),
                    sampling=SamplingParams(temperature=0.0, ignore_eos=True),
                    max_tokens=CHECKED_TOKENS,
                )
            )
            ids = [t for s in generation.segments for t in s.token_ids]
            logprobs = [p for s in generation.segments for p in s.logprobs]
            return prompt + ids, logprobs

        return await asyncio.gather(*(one(i) for i in range(NUM_CHECKED)))

    async def weight_group_state(self) -> Any:
        """As the rollout worker does."""
        return await self._client.weight_group_state()

    async def join_weight_group(self, group: Any, first_ranks: dict[str, int]) -> None:
        """As the rollout worker does."""
        await self._client.join_weight_group(group, first_ranks)

    async def begin_sync(self, policy_version: int, notice: bytes, *, holds_device: bool) -> None:
        """As the rollout worker does."""
        await self._syncs[self._mode].begin(policy_version, notice, holds_device=holds_device)

    async def wait_until_received(self) -> None:
        """As the rollout worker does."""
        await self._syncs[self._mode].wait_until_received()

    async def finish_sync(self, policy_version: int) -> dict[str, float]:
        """As the rollout worker does."""
        del policy_version
        return dataclasses.asdict(await self._syncs[self._mode].finish())
