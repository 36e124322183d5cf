"""A real vLLM engine and a trainer's model beside it, in one process, without Ray."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ray_apr.core.messages import Generation, SamplingParams
from ray_apr.serve.vllm.arguments import CPU_ENVIRONMENT

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
"""The likeliest token; its log-prob is that of temperature 1."""
FREE = SamplingParams(ignore_eos=True)
PROMPT = (5, 9, 2, 14, 3)
ON_CUDA = {
    "gpu_memory_utilization": 0.05,
    "kv_cache_memory_bytes": 200_000_000,
}
"""Many small engines beside each other on a GPU."""


def make_engine(
    model: Path,
    *,
    device: str = "cpu",
    partial_rollout: Any = None,
    **engine_kwargs: Any,
) -> Any:
    """An engine that is not started, set up as the rollout servers are, but for Ray."""
    from ray_apr.config import RolloutConfig
    from ray_apr.serve.spec import EngineSpec
    from ray_apr.serve.vllm.engine import VLLMEngine

    engine = {"device": device, "dtype": "float32"}
    config = RolloutConfig(engine=engine, sampling={"top_k": 64})  # any top_k may be asked for
    if device == "cuda":
        engine_kwargs = ON_CUDA | engine_kwargs
    else:
        os.environ.update(CPU_ENVIRONMENT)
    spec = EngineSpec.of_run(str(model), config, partial_rollout, max_model_len=512)
    spec = replace(spec, engine_kwargs={"max_num_seqs": 64, **engine_kwargs})
    return VLLMEngine(spec, "engine-0")


def ids_of(*generations: Generation) -> tuple[int, ...]:
    return tuple(t for g in generations for s in g.segments for t in s.token_ids)


def logprobs_of(*generations: Generation) -> list[float]:
    return [p for g in generations for s in g.segments for p in s.logprobs]


def versions_of(*generations: Generation) -> list[int]:
    return [s.policy_version for g in generations for s in g.segments for _ in s.token_ids]


def hf_logprobs(
    model: Any, prompt: Sequence[int], response: Sequence[int], *, temperature: float = 1.0
) -> list[float]:
    """Log-probs of a response by Hugging Face's own forward pass, in float32."""
    import torch

    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *response]])).logits[0]
    picked = (logits / temperature).log_softmax(-1)[len(prompt) - 1 : -1]
    return picked.gather(1, torch.tensor(response)[:, None])[:, 0].tolist()


def largest_gap(a: Sequence[float], b: Sequence[float]) -> float:
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


class Trainer:
    """The sending side: a Hugging Face model and its end of the weight group."""

    def __init__(self, folder: Path, model: Any = None, *, wire_dtype: str | None = None) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        from ray_apr.weights.gathered import GatheredWeights
        from ray_apr.weights.transports import make_sender

        if model is None:
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.model: Any = model
        weights = GatheredWeights(self.model, bucket_mb=0.125, wire_dtype=wire_dtype)
        self.sender = make_sender("auto", weights, shares_device=False)
        self.collective: Any = None

    def change(self) -> None:
        """Move all weights, as an optimizer step does."""
        import torch

        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))

    async def join(self, engine: Any) -> None:
        """Build a group of this trainer and one engine."""
        self.collective = await joined_by(self.sender, engine, timeout_s=20.0)

    def broadcast(self, num_buckets: int | None = None) -> None:
        """Send all buckets, or the first of them, as a train worker does."""
        from ray_apr.weights.collective import from_rank_0

        self.sender.gather()
        for bucket in self.sender.weights.staged[:num_buckets]:
            self.collective.broadcast([bucket], from_rank_0())

    async def sync(self, engine: Any, version: int, mode: str = "abort") -> None:
        """One whole weight sync."""
        await engine.pause(mode)
        try:
            receiving = asyncio.create_task(engine.receive_weights(version))
            await asyncio.to_thread(self.broadcast)
            await receiving
        finally:
            await engine.resume()


class DirectControl:
    """Rank 0's line to one engine in the same process: what `RunControl` does, without Ray.

    Args:
        engine: Started.
        run: Runs a coroutine to its end, on the engine's event loop.

    Attributes:
        spoil: Called with the tensors that leave, by name, and those of the sync before.
        after_receive: Awaited once the engine has its weights, before it goes on.
    """

    sync_limit_s = retry_limit_s = 60.0
    members = frozenset({"engine-0"})

    def __init__(self, engine: Any, run: Callable[[Coroutine[Any, Any, Any]], Any]) -> None:
        self.engine = engine
        self.run = run
        self.spoil: Callable[[dict[str, Any], dict[str, Any]], None] | None = None
        self.after_receive: Callable[[], Coroutine[Any, Any, Any]] | None = None
        self._collective: Any = None
        self._before: dict[str, Any] = {}

    def is_group_whole(self) -> bool:
        return self._collective is not None

    def connect(self, sender: Any, *, timeout_s: float) -> None:
        self._collective = self.run(joined_by(sender, self.engine, timeout_s=timeout_s))

    def broadcast(self, sender: Any, policy_version: int) -> dict[str, float]:
        from ray_apr.weights.collective import from_rank_0

        leaving = dict(sender.weights.named())
        copies = {name: tensor.clone() for name, tensor in leaving.items()}
        if self.spoil is not None:
            self.spoil(leaving, self._before)
        self._before = copies

        def send() -> None:
            for bucket in sender.weights.staged:
                self._collective.broadcast([bucket], from_rank_0())

        async def sync() -> float:
            begin = time.monotonic()
            await self.engine.pause("abort")
            receiving = asyncio.create_task(self.engine.receive_weights(policy_version))
            await asyncio.to_thread(send)
            await receiving
            if self.after_receive is not None:
                await self.after_receive()
            await self.engine.resume()
            return time.monotonic() - begin

        return {"stopped_s": self.run(sync())}

    def expect_scores(self, policy_version: int, sequences: Any) -> None:
        self.engine.expect_scores(policy_version, sequences)

    def weight_scores(self) -> list[Any]:
        return [self.engine.scores] if self.engine.scores else []

    def probe_weights(self, replica_id: str, token_ids: Any) -> Any:
        assert replica_id == self.engine.replica_id
        return self.run(self.engine.probe_weights(token_ids))

    def record_span(self, *_: Any, **__: Any) -> None:
        pass


async def joined_by(sender: Any, engine: Any, *, timeout_s: float) -> Any:
    """Let one engine join a new group; returns rank 0's end of it."""
    import ray.cloudpickle

    from ray_apr.core.messages import WeightGroup
    from ray_apr.weights.collective import join

    endpoint = sender.open(1, host="127.0.0.1", timeout_s=timeout_s)
    group = WeightGroup(timeout_s=timeout_s, endpoint=ray.cloudpickle.dumps(endpoint))
    joined = asyncio.create_task(engine.join_weight_group(group, 1))
    collective = await asyncio.to_thread(join, endpoint, 0)
    await joined
    return collective


@contextlib.asynccontextmanager
async def running(engine: Any) -> AsyncIterator[Any]:
    """Start an engine, and end it."""
    await engine.start()
    try:
        yield engine
    finally:
        engine.shutdown()


class SyncingTrainer:
    """A train worker's model with one engine: what a run does at a sync, on both ends of it.

    Args:
        folder: The model.
        control: The line to the engine.
        device: Where the model computes.
        dtype: In which the weights travel: the engine's.
        train: Settings of `TrainConfig`.
    """

    def __init__(
        self,
        folder: Path,
        control: DirectControl,
        *,
        device: str = "cpu",
        dtype: str = "float32",
        **train: Any,
    ) -> None:
        import torch

        from ray_apr.config import TrainConfig
        from ray_apr.train.fsdp import build_model
        from ray_apr.train.publish import WeightPublisher
        from ray_apr.train.weight_check import WeightCheck
        from ray_apr.weights.gathered import GatheredWeights
        from ray_apr.weights.transports import make_sender

        self.control = control
        settings = {"weight_bucket_mb": 0.125, "weight_check_every": 1, "param_dtype": "float32"}
        self.config = TrainConfig(**settings | train)
        self.model: Any = build_model(str(folder), self.config, torch.device(device))
        weights = GatheredWeights(self.model, bucket_mb=0.125, wire_dtype=dtype)
        self.sender = make_sender("auto", weights, shares_device=False)
        self.check = WeightCheck(self.model, self.config)
        self.publisher = WeightPublisher(
            self.sender,
            control,  # type: ignore[arg-type]
            sync_every=1,
            overlaps=False,
            timeout_s=20.0,
            wait_limit_s=20.0,
            check=self.check,
        )

    def step(self, size: float) -> None:
        """Move all weights that are trained; they began with a size of 0.1."""
        import torch

        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.requires_grad:
                    parameter.add_(size * torch.randn_like(parameter))

    def sync(
        self,
        size: float = 0.02,
        spoil: Callable[[dict[str, Any], dict[str, Any]], None] | None = None,
    ) -> Mapping[str, float]:
        """Step, sync and check; returns the figures of both."""
        self.step(size)
        self.control.spoil = spoil
        version = self.control.engine.policy_version + 1
        return self.publisher.after_step(version, version, is_last=False)


@contextlib.contextmanager
def started(folder: Path, **engine_kwargs: Any) -> Iterator[DirectControl]:
    """An engine and the line to it."""
    with asyncio.Runner() as runner:
        context = running(make_engine(folder, **engine_kwargs))
        engine = runner.run(context.__aenter__())
        try:
            yield DirectControl(engine, runner.run)
        finally:
            runner.run(context.__aexit__(None, None, None))
