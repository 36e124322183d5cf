"""Gathering of sharded weights (weights/gather.py) on several ranks."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from ray_apr.config import LoRAConfig, TrainConfig
from ray_apr.train.checkpoint import full_parameters
from ray_apr.train.fsdp import build_model
from ray_apr.weights.gathered import GatheredWeights
from ray_apr.weights.transports import make_sender
from tests.families import make_family
from tests.tiny_model import make_tiny_model
from tests.train_batches import process_group, start_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

BUCKET_MB = 0.01
"""Several parameters in a bucket, and the embedding larger than one."""


def work(rank, world_size, folder, train, wire_dtype, shares, results):
    torch.set_num_threads(1)
    with process_group(results, rank=rank, world_size=world_size):
        model = build_model(str(folder), train, torch.device("cpu"))
        weights = GatheredWeights(model, bucket_mb=BUCKET_MB, wire_dtype=wire_dtype)
        sender = make_sender("auto", weights, shares_device=shares)
        for _ in range(2):
            sender.gather()
        expected = dict(full_parameters(model))
        if rank and not shares:
            assert weights.staged == []
            return
        assert bool(sender.prepare()) == (shares and rank == 0)
        found = {name: tensor.clone() for name, tensor in weights.named()}
        torch.save((found, expected), results / f"found-{rank}.pt")


@pytest.mark.parametrize(
    ("world_size", "train", "wire_dtype", "shares"),
    [
        (1, TrainConfig(), "bfloat16", False),
        (2, TrainConfig(), None, False),
        (3, TrainConfig(), "bfloat16", False),
        (3, TrainConfig(), "bfloat16", True),
        (4, TrainConfig(shard_ranks=2), None, False),
        (4, TrainConfig(shard_ranks=2), None, True),
        (2, TrainConfig(lora=LoRAConfig(rank=2)), None, False),
    ],
)
def test_rank_0_has_all_rows_of_all_ranks(tmp_path, world_size, train, wire_dtype, shares):
    """Or each rank, where each shares them with the engines of its device."""
    folder = make_tiny_model(tmp_path / "model", hidden_size=32)
    check(tmp_path, folder, world_size, train, wire_dtype, shares)


def test_experts_are_whole_on_rank_0_though_each_rank_has_some_of_them(tmp_path):
    """Four experts on three ranks: two, two and none."""
    check(tmp_path, make_family("Mixtral", tmp_path / "model"), 3, TrainConfig(), None, False)


def check(tmp_path, folder, world_size, train, wire_dtype, shares):
    train = dataclasses.replace(train, packing="padded")
    start_ranks(work, world_size, folder, train, wire_dtype, shares, tmp_path)
    for rank in range(world_size if shares else 1):
        found, expected = torch.load(tmp_path / f"found-{rank}.pt")
        assert set(found) == set(expected)
        assert any(len(w) % world_size for w in expected.values()) or world_size < 3, "uneven rows"
        for name, weights in expected.items():
            wanted = weights if wire_dtype is None else weights.to(torch.bfloat16)
            torch.testing.assert_close(found[name], wanted, rtol=0, atol=0)
