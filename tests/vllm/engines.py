"""A real vLLM engine and a trainer's model beside it, in one process, without Ray."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from ray_apr.serve.builder import CPU_ENVIRONMENT, engine_arguments
from ray_apr.types import Generation, SamplingParams

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
"""The likeliest token; its log-prob is that of temperature 1."""
FREE = SamplingParams(ignore_eos=True)
PROMPT = (5, 9, 2, 14, 3)


def make_engine(
    model: Path,
    *,
    keep_kv_cache: bool = False,
    stall_timeout_s: float = 300.0,
    **engine_kwargs: Any,
) -> Any:
    """An engine that is not started, set up as the rollout servers are on CPU."""
    from ray_apr.config import RolloutConfig
    from ray_apr.serve.engine import Engine

    os.environ.update(CPU_ENVIRONMENT)
    config = RolloutConfig(device="cpu", top_k=64)  # any top_k may be asked for
    arguments = engine_arguments(config, 512, on_cuda=False)
    return Engine(
        str(model),
        replica_id="engine-0",
        engine_kwargs={**arguments, "max_num_seqs": 64, **engine_kwargs},
        keep_kv_cache=keep_kv_cache,
        stall_timeout_s=stall_timeout_s,
    )


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

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        from ray_apr.weights.sender import WeightSender

        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.sender = WeightSender(self.model, bucket_mb=0.125)
        self.collective: Any = None

    def change(self) -> None:
        """Move all weights, as an optimizer step does."""
        import torch

        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))

    async def join(self, engine: Any) -> None:
        """Build a group of this trainer and one engine."""
        from ray_apr.weights.collective import join

        group = self.sender.open_group(1, host="127.0.0.1", timeout_s=20.0)
        joined = asyncio.create_task(engine.join_weight_group(group.to_dict(), 1))
        self.collective = await asyncio.to_thread(join, group, 0)
        await joined

    def broadcast(self, num_buckets: int | None = None) -> None:
        """Send all buckets, or the first of them, as a train worker does."""
        from ray.util.collective import types

        options = types.BroadcastOptions()
        options.root_rank, options.root_tensor = 0, 0
        self.sender.gather()
        for bucket in self.sender.staged[:num_buckets]:
            self.collective.broadcast([bucket], options)

    async def sync(self, engine: Any, version: int, mode: str = "abort") -> None:
        """One whole weight sync."""
        await engine.pause(mode)
        try:
            receiving = asyncio.create_task(engine.receive_weights(version))
            await asyncio.to_thread(self.broadcast)
            await receiving
        finally:
            await engine.resume()


@contextlib.asynccontextmanager
async def running(engine: Any) -> AsyncIterator[Any]:
    """Start an engine, and end it."""
    await engine.start()
    try:
        yield engine
    finally:
        engine.shutdown()
