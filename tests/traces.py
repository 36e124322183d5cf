"""Small traces and clusters for tests of the simulator."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

from ray_apr.tools.simulator.cluster import BatchConfig, ClusterConfig, EngineConfig, TrainerConfig
from ray_apr.tools.simulator.trace import Trace


def make_rows(
    num_prompts: int = 64,
    *,
    group_size: int = 4,
    seed: int = 0,
    median: int = 40,
    tail: tuple[int, int] = (400, 800),
    tail_share: float = 0.1,
    reward_s: float = 0.05,
) -> list[dict[str, Any]]:
    """Rows of a trace; of `tail_share` of the prompts, each second response is in the tail."""
    draw = random.Random(seed)
    rows = []
    for prompt in range(num_prompts):
        has_tail = draw.random() < tail_share
        for index in range(group_size):
            length = max(1, round(draw.lognormvariate(0, 0.4) * median))
            if has_tail and draw.random() < 0.5:
                length = draw.randint(*tail)
            rows.append(
                {
                    "prompt_id": f"p{prompt}",
                    "sample_index": index,
                    "prompt_tokens": draw.randint(5, 30),
                    "response_tokens": length,
                    "reward_s": reward_s * draw.random(),
                }
            )
    return rows


def make_trace(num_prompts: int = 64, **options: Any) -> Trace:
    """A small trace; see `make_rows`."""
    return Trace(make_rows(num_prompts, **options))


def make_cluster(**changes: Any) -> ClusterConfig:
    """Four GPUs, two of which generate; batches of 8 groups of 4."""
    cluster = ClusterConfig(
        gpus=4,
        rollout_gpus=2,
        engine=EngineConfig(
            decode_base_s=0.01,
            decode_per_sequence_s=0.0005,
            decode_per_context_token_s=1e-6,
            kv_capacity_tokens=6000,
            max_sequences=32,
            prefill_tokens_per_s=20_000.0,
        ),
        trainer=TrainerConfig(tokens_per_s_per_gpu=400.0, step_overhead_s=0.5),
        weight_sync_s=0.2,
        switch_s=0.3,
        reward_workers=16,
        batch=BatchConfig(prompts=8, group_size=4),
        steps=8,
    )
    return dataclasses.replace(cluster, **changes)
