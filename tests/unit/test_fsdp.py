from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch
import torch.multiprocessing as mp

from ray_apr.config import AlgorithmConfig, TrainConfig
from ray_apr.exceptions import ConfigError, TrainError
from ray_apr.train.checkpoint import full_parameters
from ray_apr.train.fsdp import build_model, build_optimizer, learning_rate, local_tensor
from ray_apr.train.logprobs import micro_batches, response_logprobs
from ray_apr.train.step import train_step
from tests.tiny_model import make_tiny_model
from tests.train_batches import make_batches, make_samples, process_group

CPU = torch.device("cpu")
TRAIN = TrainConfig(learning_rate=1e-2, max_grad_norm=1e9)


def gradients_of_a_step(model, row, algorithm, train):
    """Whole gradients of one step, by name, and its figures; the weights stay."""
    model.requires_grad_(True)
    kept = {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    names = {id(p): n for n, p in model.named_parameters()}

    def keep(optimizer, _args, _kwargs):
        for p in optimizer.param_groups[0]["params"]:
            kept[names[id(p)]] = p.grad.full_tensor().clone()

    optimizer.register_step_pre_hook(keep)
    return train_step(model, optimizer, row, algorithm, train), kept


def work(rank, world_size, folder, micro_batch_tokens, train, results):
    """One rank: gradients and figures of a step, then whole weights after an AdamW step."""
    torch.set_num_threads(1)
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
        after = [local_tensor(p) for p in model.parameters()]
        return all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    return False


def run_ranks(tmp_path, folder, world_size, micro_batch_tokens, train=TRAIN):
    results = tmp_path / f"{world_size}-{micro_batch_tokens}-{train.activation_checkpointing}"
    results.mkdir()
    args = (world_size, folder, micro_batch_tokens, train, results)
    if world_size == 1:
        work(0, *args)
    else:
        mp.spawn(work, args, nprocs=world_size)
    return [torch.load(results / f"{r}.pt") for r in range(world_size)]


def distance(ours, theirs):
    """Relative distance of two sets of tensors."""
    difference = sum((ours[n] - theirs[n]).double().square().sum() for n in theirs)
    return (difference / sum(t.double().square().sum() for t in theirs.values())).sqrt().item()


def test_ranks_and_micro_batches_do_not_change_the_step(tmp_path):
    folder = make_tiny_model(tmp_path / "model", hidden_size=32)
    ((figures, gradients, weights, failed),) = run_ranks(tmp_path, folder, 1, 4096)
    assert failed
    recomputing = dataclasses.replace(TRAIN, activation_checkpointing=True)
    others = [
        *run_ranks(tmp_path, folder, 1, 64),
        *run_ranks(tmp_path, folder, 1, 4096, recomputing),
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


@pytest.mark.parametrize("tie", [True, False])
def test_tied_weights_stay_tied_and_names_are_those_of_hugging_face(tmp_path, tie):
    folder = make_tiny_model(tmp_path / "model", hidden_size=32, tie=tie)
    with process_group(tmp_path):
        model = build_model(str(folder), TRAIN, CPU)
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == tie
        names = [n for n, _ in full_parameters(model)]
        assert ("lm_head.weight" in names) == (not tie)
        assert "model.layers.1.self_attn.q_proj.weight" in names
        (row,) = make_batches(make_samples())
        optimizer = build_optimizer(model, TRAIN)
        train_step(model, optimizer, row, AlgorithmConfig(), TRAIN)
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == tie


def test_bfloat16_forward_keeps_float32_master_weights(tmp_path):
    folder = make_tiny_model(tmp_path / "model", hidden_size=32)
    with process_group(tmp_path):
        (row,) = make_batches(make_samples())
        figures = []
        for dtype in ("float32", "bfloat16"):
            train = dataclasses.replace(TRAIN, param_dtype=dtype)
            model = build_model(str(folder), train, CPU)
            assert {p.dtype for p in model.parameters()} == {torch.float32}
            optimizer = build_optimizer(model, train)
            figures.append(train_step(model, optimizer, row, AlgorithmConfig(), train))
        assert figures[1]["grad_norm"] == pytest.approx(figures[0]["grad_norm"], rel=0.05)
        assert figures[1]["grad_norm"] != figures[0]["grad_norm"]


def test_dropout_is_off(tmp_path):
    folder = make_tiny_model(tmp_path / "model", hidden_size=32)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "attention_dropout": 0.5}))
    with process_group(tmp_path):
        model = build_model(str(folder), TRAIN, CPU)
        (row,) = make_batches(make_samples(), micro_batch_tokens=4096)
        (part,) = micro_batches(row, CPU)
        first, second = (response_logprobs(model, part)[0] for _ in range(2))
        assert torch.equal(first, second)


def test_a_model_that_changes_its_logits_is_refused(tmp_path):
    from transformers import Gemma2Config

    config = Gemma2Config(num_hidden_layers=1, hidden_size=8, intermediate_size=8)
    config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="final_logit_softcapping"):
        build_model(str(tmp_path), TRAIN, CPU)


def test_weight_decay_leaves_vectors_alone():
    model = torch.nn.Linear(2, 2)
    train = TrainConfig(weight_decay=0.1)
    matrices, vectors = build_optimizer(model, train).param_groups
    assert matrices["weight_decay"] == 0.1 and matrices["params"] == [model.weight]
    assert vectors["weight_decay"] == 0.0 and vectors["params"] == [model.bias]


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]),
        ("cosine", [0.5, 1.0, 1.0, 0.8535534, 0.5, 0.1464466]),
    ],
)
def test_learning_rate(schedule, expected):
    train = TrainConfig(steps=6, warmup_steps=2, learning_rate=1.0, lr_schedule=schedule)
    assert [learning_rate(train, s) for s in range(6)] == pytest.approx(expected)
