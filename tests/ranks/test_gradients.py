"""One global batch gives one step: on any number of ranks, however it is cut and sharded."""

from __future__ import annotations

import dataclasses
import math
from typing import get_args

import pytest
import torch
from torch.distributed.tensor import DTensor

from ray_apr.config import AlgorithmConfig, LoRAConfig, TrainConfig
from ray_apr.config.algorithm import Aggregation
from ray_apr.core.exceptions import TrainError
from ray_apr.train import fsdp
from ray_apr.train.checkpoint import full_parameters
from ray_apr.train.fsdp import build_model, build_optimizer, drop_gathered, local_tensor
from ray_apr.train.step import train_step
from tests.tiny_model import make_tiny_model
from tests.train_batches import make_batches, make_samples, process_group, start_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

CPU = torch.device("cpu")
TRAIN = TrainConfig(learning_rate=1e-2, max_grad_norm=1e9)
LAYER_BY_LAYER = 1
"""Size of a unit of FSDP on two ranks; on others all layers of so small a model are one."""
LAYOUTS = {"alone": (1, "padded"), "few": (96, "padded"), "all": (4096, "padded")}
LAYOUTS |= {"packed": (96, "packed"), "all packed": (4096, "packed")}


def gradients_of_a_step(model, row, algorithm, train):
    """Whole gradients of one step, by name, and its figures; the weights stay."""
    kept = {}
    optimizer = build_optimizer(model, train)
    names = {id(p): n for n, p in model.named_parameters()}

    def keep(optimizer, _args, _kwargs):
        for group in optimizer.param_groups:
            for p in group["params"]:
                whole = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
                kept[names[id(p)]] = whole.clone()

    optimizer.register_step_pre_hook(keep)
    standing = dataclasses.replace(train, learning_rate=1e-30)
    return train_step(model, optimizer, row, algorithm, standing), kept


def work(rank, world_size, folder, micro_batch_tokens, train, results):
    """One rank: gradients and figures of a step, then whole weights after an AdamW step."""
    torch.set_num_threads(1)
    fsdp._UNIT_BYTES = LAYER_BY_LAYER if world_size == 2 else fsdp._UNIT_BYTES
    with process_group(results, rank=rank, world_size=world_size):
        model = build_model(str(folder), train, CPU)
        rows = make_batches(
            make_samples(num_segments=3), num_ranks=world_size,
            micro_batch_tokens=micro_batch_tokens, oldest_version=1,
        )  # fmt: skip
        assert 0 < sum(rows[rank].loss_mask) < len(rows[rank].loss_mask)
        figures, gradients = gradients_of_a_step(model, rows[rank], AlgorithmConfig(), train)
        optimizer = build_optimizer(model, train)
        train_step(model, optimizer, rows[rank], AlgorithmConfig(), train)
        weights = {n: w.clone() for n, w in full_parameters(model)}
        failed = expect_failure(model, optimizer, rows[rank], train, rank)
        torch.save((figures, gradients, weights, failed), results / f"{rank}.pt")


def expect_failure(model, optimizer, row, train, rank):
    """Rank 0 alone has a broken log-prob: whether THIS rank raised, and kept its weights."""
    before = [local_tensor(p).detach().clone() for p in model.parameters()]
    if rank == 0:
        broken = [math.nan] * len(row.behavior_logprobs)
        row = dataclasses.replace(row, behavior_logprobs=broken)
    try:
        train_step(model, optimizer, row, AlgorithmConfig(), train)
    except TrainError:
        drop_gathered(model)
        after = [local_tensor(p) for p in model.parameters()]
        return all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    return False


def run_ranks(tmp_path, folder, world_size, micro_batch_tokens, train=TRAIN):
    results = tmp_path / str(len(list(tmp_path.iterdir())))
    results.mkdir()
    args = (world_size, folder, micro_batch_tokens, train, results)
    if world_size == 1:
        work(0, *args)
    else:
        start_ranks(work, *args)
    return [torch.load(results / f"{r}.pt") for r in range(world_size)]


def distance(ours, theirs):
    """Relative distance of two sets of tensors."""
    difference = sum((ours[n] - theirs[n]).double().square().sum() for n in theirs)
    return (difference / sum(t.double().square().sum() for t in theirs.values())).sqrt().item()


def test_ranks_and_micro_batches_do_not_change_the_step(tmp_path):
    folder = make_tiny_model(tmp_path / "model", hidden_size=32)
    ((figures, gradients, weights, failed),) = run_ranks(tmp_path, folder, 1, 4096)
    assert failed
    whole, selective = (
        dataclasses.replace(TRAIN, activation_checkpointing=kind) for kind in (True, "selective")
    )
    others = [
        *run_ranks(tmp_path, folder, 1, 64),
        *run_ranks(tmp_path, folder, 1, 4096, whole),
        *run_ranks(tmp_path, folder, 1, 4096, selective),
        *run_ranks(tmp_path, folder, 2, 96),
    ]
    for other_figures, other_gradients, other_weights, other_failed in others:
        assert distance(other_gradients, gradients) < 1e-6
        assert distance(other_weights, weights) < 1e-3  # AdamW's first step is a sign of noise
        assert other_failed
        for name, value in figures.items():
            assert other_figures[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
    assert others[-1][0] == others[-2][0], "both ranks see the same figures"
    assert torch.equal(others[-1][2]["model.norm.weight"], others[-2][2]["model.norm.weight"])


def test_ranks_do_not_change_a_step_of_adapters(tmp_path):
    folder = make_tiny_model(tmp_path / "model", hidden_size=32)
    adapted = dataclasses.replace(TRAIN, lora=LoRAConfig(rank=4))
    ((_, gradients, weights, _),) = run_ranks(tmp_path, folder, 1, 4096, adapted)
    assert gradients and all(".lora_" in name for name in gradients)
    for _, other_gradients, other_weights, _ in run_ranks(tmp_path, folder, 2, 96, adapted):
        assert distance(other_gradients, gradients) < 1e-6
        assert list(other_weights) == list(weights), "merged, under the names of the base model"
        assert distance(other_weights, weights) < 1e-3


def work_on_layouts(rank, world_size, folder, train, results):
    """One rank: whole gradients for each aggregation and each way to cut the batch."""
    torch.set_num_threads(1)
    found = {}
    with process_group(results, rank=rank, world_size=world_size):
        model = build_model(str(folder), train, CPU)
        for aggregation in get_args(Aggregation):
            algorithm = AlgorithmConfig(aggregation=aggregation)
            for layout, (tokens, packing) in LAYOUTS.items():
                rows = make_batches(
                    make_samples(num_segments=3), num_ranks=world_size, micro_batch_tokens=tokens,
                    oldest_version=1, packed=packing == "packed",
                )  # fmt: skip
                settings = dataclasses.replace(train, packing=packing)
                figures, gradients = gradients_of_a_step(model, rows[rank], algorithm, settings)
                found[aggregation, layout] = (figures["grad_norm"], gradients)
    if rank == 0:
        torch.save(found, results / "found.pt")


@pytest.mark.parametrize(("world_size", "shard_ranks"), [(1, None), (2, None), (4, None), (4, 2)])
def test_gradients_do_not_depend_on_ranks_layout_or_sharding(tmp_path, world_size, shard_ranks):
    folder = make_tiny_model(tmp_path / "model", hidden_size=32)
    samples, results = make_samples(num_segments=3), tmp_path / "results"
    results.mkdir()
    train = dataclasses.replace(TRAIN, shard_ranks=shard_ranks)
    start_ranks(work_on_layouts, world_size, folder, train, results)
    found = torch.load(results / "found.pt")
    assert len(found) == 3 * len(LAYOUTS)
    with process_group(tmp_path):
        model = build_model(str(folder), TRAIN, CPU)
        for aggregation in get_args(Aggregation):
            (row,) = make_batches(samples, micro_batch_tokens=4096, oldest_version=1)
            figures, expected = gradients_of_a_step(
                model, row, AlgorithmConfig(aggregation=aggregation), TRAIN
            )
            for layout in LAYOUTS:
                norm, gradients = found[aggregation, layout]
                assert distance(gradients, expected) < 1e-6, (aggregation, layout)
                assert norm == pytest.approx(figures["grad_norm"], rel=1e-5)
