from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ray_apr.config import AlgorithmConfig, TrainConfig
from ray_apr.exceptions import ConfigError
from ray_apr.train.checkpoint import full_parameters
from ray_apr.train.fsdp import build_model, build_optimizer, learning_rate
from ray_apr.train.logprobs import micro_batches, response_logprobs
from ray_apr.train.step import train_step
from tests.tiny_model import make_tiny_model
from tests.train_batches import make_batches, make_samples, process_group

CPU = torch.device("cpu")
TRAIN = TrainConfig(learning_rate=1e-2, max_grad_norm=1e9)


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


class Products(TorchDispatchMode):
    """Counts matrix products, attention, and everything else."""

    def __init__(self):
        super().__init__()
        self.dear = self.cheap = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if "mm" in op.name() or "dot_product" in op.name():
            self.dear += 1
        else:
            self.cheap += 1
        return op(*args, **(kwargs or {}))


def test_selective_checkpointing_computes_only_cheap_operations_again(tmp_path):
    folder = make_tiny_model(tmp_path / "model", hidden_size=32)
    counts = {}
    (row,) = make_batches(make_samples(), micro_batch_tokens=4096)
    with process_group(tmp_path):
        for kind in (False, "selective", True):
            train = TrainConfig(activation_checkpointing=kind)
            model = build_model(str(folder), train, CPU)
            (part,) = micro_batches(row, CPU)
            logprobs, _ = response_logprobs(model, part)
            with Products() as products:
                logprobs.sum().backward()
            counts[kind] = products
    assert counts["selective"].dear == counts[False].dear < counts[True].dear
    assert counts[False].cheap < counts["selective"].cheap
