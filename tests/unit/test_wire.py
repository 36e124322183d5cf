"""What crosses the wire is the checkpoint (weights/wire.py)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import Chunk, Concatenate, Transpose, WeightConverter

from ray_apr.core.exceptions import WeightSyncError
from ray_apr.train.checkpoint import export_hf, full_parameters
from ray_apr.weights.gathered import GatheredWeights
from ray_apr.weights.plan import plan_buckets
from ray_apr.weights.wire import wire_tensors
from tests.families import FAMILIES, make_family


def load(folder: Path):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.mark.parametrize("family", FAMILIES)
def test_names_shapes_and_values_on_the_wire_and_in_exports_are_those_of_the_checkpoint(
    tmp_path, family
):
    folder = make_family(family, tmp_path / "model")
    checkpoint = load_file(folder / "model.safetensors")
    model = load(folder)
    sender = GatheredWeights(model, bucket_mb=0.05)
    buffers = {name for name, _ in model.named_buffers()}
    learned = {n: t for n, t in checkpoint.items() if n not in buffers}
    assert {p.name: p.shape for p in sender.params} == {n: t.shape for n, t in learned.items()}
    sender.gather()
    buckets = plan_buckets(sender.params, int(0.05 * 2**20))
    for bucket, buffer in zip(buckets, sender.staged, strict=True):
        for piece in bucket.slices:
            begin, end = piece.offset, piece.offset + piece.param.num_bytes
            sent = buffer[begin:end].view(torch.float32).view(piece.param.shape)
            assert torch.equal(sent, checkpoint[piece.param.name]), piece.param.name
    assert dict(full_parameters(model)).keys() == checkpoint.keys()
    export_hf(tmp_path / "export", model, str(folder))
    exported = load_file(tmp_path / "export" / "model.safetensors")
    assert exported.keys() == checkpoint.keys()
    for name, tensor in checkpoint.items():
        assert torch.equal(exported[name], tensor), name


def test_experts_are_ranges_of_the_parameter_that_holds_them_all(tmp_path):
    model = load(make_family("Mixtral", tmp_path))
    shapes = {n: p.shape for n, p in model.named_parameters()}
    tensors = {t.name: t for t in wire_tensors(model, shapes)}
    source = "model.layers.0.mlp.experts.gate_up_proj"
    up = tensors["model.layers.0.block_sparse_moe.experts.1.w3.weight"]
    assert shapes[source] == (4, 256, 64)
    assert (up.source, up.shape, up.begin) == (source, (128, 64), (1 * 256 + 128) * 64)
    parameter = model.get_parameter(source).detach()
    assert torch.equal(up.of(parameter), parameter[1, 128:])


@pytest.mark.parametrize(
    ("conversion", "match"),
    [
        (
            WeightConverter("mlp.down_proj.weight", "mlp.down_proj.weight", [Transpose(0, 1)]),
            "made of its parameters by more than cutting them",
        ),
        (
            WeightConverter(
                "mlp.gate_up.weight",
                ["mlp.gate_proj.weight", "mlp.up_proj.weight"],
                [Chunk(dim=0)],
            ),
            "made of its parameters by more than cutting them",
        ),
        (
            WeightConverter(
                ["mlp.a.weight", "mlp.b.weight"], "mlp.down_proj.weight", [Concatenate(dim=1)]
            ),
            "made of its parameters by more than cutting them",
        ),
    ],
)
def test_a_checkpoint_that_needs_more_than_cutting_is_refused(tmp_path, conversion, match):
    model = load(make_family("Qwen3", tmp_path))
    model._weight_conversions = [conversion]
    with pytest.raises(WeightSyncError, match=match):
        GatheredWeights(model, bucket_mb=1)


def test_before_transformers_5_a_model_is_as_its_checkpoint(tmp_path, monkeypatch):
    model = load(make_family("Mixtral", tmp_path))
    monkeypatch.setitem(sys.modules, "transformers.core_model_loading", None)
    names = [t.name for t in wire_tensors(model, {n: p.shape for n, p in model.named_parameters()})]
    assert names == [n for n, _ in model.named_parameters()]
