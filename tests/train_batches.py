"""Batches and a process group for tests of the train side."""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from ray_apr.core.sample import FinishReason, Prompt, Sample, Segment
from ray_apr.scheduling.batch import RankBatch, build_rank_batches

torch.set_num_threads(1)  # models this small only lose by more
multiprocessing.set_forkserver_preload(["ray_apr.train.checkpoint", "ray_apr.train.learner"])


def make_samples(
    *,
    num_groups: int = 4,
    group_size: int = 4,
    seed: int = 0,
    num_segments: int = 1,
    longest: int = 24,
) -> list[Sample]:
    """Random scored samples of the vocabulary 1..40, of unequal lengths up to `longest` tokens.

    With one segment, a sample is of version 0, 1 or 2; with several, of as many versions from 0 on
    as it has tokens for.
    """
    rng = random.Random(seed)
    samples = []
    for g in range(num_groups):
        prompt_ids = tuple(rng.randrange(1, 41) for _ in range(rng.randrange(1, 9)))
        prompt = Prompt(prompt_id=f"p{g}", token_ids=prompt_ids)
        for i in range(group_size):
            length = rng.randrange(1, longest + 1)
            samples.append(
                Sample(
                    sample_id=f"p{g}-{i}",
                    group_id=f"p{g}",
                    prompt=prompt,
                    max_response_tokens=longest + 8,
                    segments=_make_segments(rng, length, num_segments),
                    finish_reason=FinishReason.STOP,
                    reward=rng.random(),
                )
            )
    return samples


def _make_segments(rng: random.Random, length: int, num_segments: int) -> tuple[Segment, ...]:
    first = rng.randrange(3) if num_segments == 1 else 0
    token_ids = tuple(rng.randrange(1, 41) for _ in range(length))
    logprobs = tuple(-6 * rng.random() for _ in range(length))
    share = -(-length // num_segments)
    return tuple(
        Segment(
            policy_version=first + begin // share,
            token_ids=token_ids[begin : begin + share],
            logprobs=logprobs[begin : begin + share],
        )
        for begin in range(0, length, share)
    )


def make_batches(
    samples: list[Sample],
    *,
    num_ranks: int = 1,
    micro_batch_tokens: int = 128,
    step: int = 0,
    policy_version: int = 3,
    oldest_version: int = 0,
    mini_batches: int = 1,
    packed: bool = False,
) -> list[RankBatch]:
    """One row a rank."""
    return build_rank_batches(
        samples,
        step=step,
        policy_version=policy_version,
        oldest_version=oldest_version,
        num_ranks=num_ranks,
        micro_batch_tokens=micro_batch_tokens,
        mini_batches=mini_batches,
        packed=packed,
    )


@contextmanager
def process_group(
    folder: Path, *, rank: int = 0, world_size: int = 1, backend: str = "gloo"
) -> Iterator[None]:
    """A default process group, of Gloo unless told otherwise, met through a file in `folder`."""
    dist.init_process_group(
        backend, init_method=f"file://{folder / 'store'}", rank=rank, world_size=world_size
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def start_ranks(work: Callable[..., None], world_size: int, *args: Any) -> None:
    """Run ``work(rank, world_size, *args)`` in a process a rank, and wait for all of them.

    They are forked from a process that has imported what they need, and nothing more.
    """
    mp.start_processes(work, (world_size, *args), nprocs=world_size, start_method="forkserver")
