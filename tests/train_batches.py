"""Batches and a process group for tests of the train side."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from ray_apr.data.batch import RankBatch, build_rank_batches
from ray_apr.types import FinishReason, Prompt, Sample, Segment

torch.set_num_threads(1)  # models this small only lose by more


def make_samples(*, num_groups: int = 4, group_size: int = 4, seed: int = 0) -> list[Sample]:
    """Random scored samples of the vocabulary 1..40, of unequal lengths."""
    rng = random.Random(seed)
    samples = []
    for g in range(num_groups):
        prompt_ids = tuple(rng.randrange(1, 41) for _ in range(rng.randrange(1, 9)))
        prompt = Prompt(prompt_id=f"p{g}", token_ids=prompt_ids)
        for i in range(group_size):
            length = rng.randrange(1, 25)
            samples.append(
                Sample(
                    sample_id=f"p{g}-{i}",
                    group_id=f"p{g}",
                    prompt=prompt,
                    max_response_tokens=32,
                    segments=(
                        Segment(
                            policy_version=rng.randrange(3),
                            token_ids=tuple(rng.randrange(1, 41) for _ in range(length)),
                            logprobs=tuple(-6 * rng.random() for _ in range(length)),
                        ),
                    ),
                    finish_reason=FinishReason.STOP,
                    reward=rng.random(),
                )
            )
    return samples


def make_batches(
    samples: list[Sample],
    *,
    num_ranks: int = 1,
    micro_batch_tokens: int = 128,
    step: int = 0,
    policy_version: int = 3,
) -> list[RankBatch]:
    """One row a rank."""
    return build_rank_batches(
        samples,
        step=step,
        policy_version=policy_version,
        num_ranks=num_ranks,
        micro_batch_tokens=micro_batch_tokens,
    )


@contextmanager
def process_group(folder: Path, *, rank: int = 0, world_size: int = 1) -> Iterator[None]:
    """A Gloo group as the default process group, met through a file in `folder`."""
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=world_size
    )
    try:
        yield
    finally:
        dist.destroy_process_group()
