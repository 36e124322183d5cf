"""Planted corruptions of weight syncs, each caught at that sync, with a real engine and trainer."""

from __future__ import annotations

import pytest
import torch

from ray_apr.config import LoRAConfig
from ray_apr.core.exceptions import WeightMismatchError
from tests.families import make_family
from tests.tiny_model import make_tiny_model
from tests.train_batches import process_group
from tests.vllm.engines import SyncingTrainer, started
from tests.vllm.sabotage import EXTENSION

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module", autouse=True)
def _one_train_worker(tmp_path_factory):
    with process_group(tmp_path_factory.mktemp("group")):
        yield


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """(folder, control, trainer) of a tied model in float32."""
    folder = make_tiny_model(tmp_path_factory.mktemp("model"))
    with started(folder, worker_extension_cls=EXTENSION) as control:
        yield folder, control, SyncingTrainer(folder, control)


def not_sent(now, before):
    name = "model.layers.1.self_attn.k_proj.weight"
    now[name].copy_(before[name])


def scale_forgotten(now, before):
    now["model.layers.0.mlp.down_proj.weight"].mul_(16)


def version_before(now, before):
    for name, tensor in now.items():
        tensor.copy_(before[name])


def bucket_shifted(now, before):
    names = [name for name in now if name.startswith("model.layers.1.mlp")]
    flat = torch.cat([now[name].flatten() for name in names]).roll(16)
    for name, piece in zip(names, flat.split([now[n].numel() for n in names]), strict=True):
        now[name].copy_(piece.view_as(now[name]))


def layers_swapped(now, before):
    for name in [name for name in now if name.startswith("model.layers.0.")]:
        other = name.replace("layers.0.", "layers.1.")
        first = now[name].clone()
        now[name].copy_(now[other])
        now[other].copy_(first)


def keys_and_values_swapped(now, before):
    keys, values = (now[f"model.layers.0.self_attn.{p}_proj.weight"] for p in "kv")
    first = keys.clone()
    keys.copy_(values)
    values.copy_(first)


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (not_sent, r"Worst: layer 1 \(k_proj by [\d.]+ %\)\. "),
        (scale_forgotten, r"Worst: layer 0 \(down_proj by [\d.]+ %\)\. "),
        (version_before, r"Worst: .*(layer|norm|head|embedding).* more groups"),
        (bucket_shifted, r"Worst: layer 1 \((gate|up|down)_proj by [^)]*\)\. "),
        (layers_swapped, r"Worst: layer \d \(.*\), layer \d \(.*\)\. "),
        (keys_and_values_swapped, r"Worst: layer 0 \([kv]_proj by .* %, [kv]_proj by .* %\)\. "),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_corrupted_sync_is_caught_at_once_and_its_place_named(dense, spoil, named):
    _, _, side = dense
    side.sync()
    with pytest.raises(WeightMismatchError, match=rf"engine-0 .*{named}"):
        side.sync(spoil=spoil)
    assert side.sync()["weight_check_gap"] < 1e-4, "the next one is whole"


def test_a_tied_head_that_keeps_its_packed_copy_is_caught(dense):
    _, control, side = dense
    side.sync()
    control.run(control.engine._core.llm.collective_rpc("keep_head"))
    control.after_receive = lambda: control.engine._core.llm.collective_rpc("restore_head")
    try:
        with pytest.raises(WeightMismatchError, match=r"Worst: head \(by [\d.]+ %\)\. "):
            side.sync()
    finally:
        control.after_receive = None
    assert side.sync()["weight_check_gap"] < 1e-4


def test_adapters_that_were_not_merged_are_caught(dense):
    folder, control, _ = dense
    side = SyncingTrainer(
        folder, control, lora=LoRAConfig(rank=4, target_modules=("q_proj", "down_proj"))
    )
    assert side.sync()["weight_check_gap"] < 1e-4

    def not_merged(now, before):
        for name, module in side.model.named_modules():
            if hasattr(module, "lora_A"):
                now[f"{name}.weight"].copy_(module.base_layer.weight)

    layers = r"layer \d \((q|down)_proj by [^)]*\)"
    with pytest.raises(WeightMismatchError, match=rf"Worst: {layers}, {layers}\. "):
        side.sync(spoil=not_merged)


def test_scores_are_not_counted_as_rollouts(dense):
    _, control, side = dense
    before = control.engine.status()
    side.sync()
    after = control.engine.status()
    assert (after.tokens_generated, after.num_ended) == (before.tokens_generated, before.num_ended)


def test_in_bfloat16_a_step_below_rounding_that_did_not_arrive_is_caught(tmp_path):
    folder = make_tiny_model(tmp_path / "model")
    with started(folder, dtype="bfloat16") as control:
        side = SyncingTrainer(folder, control, dtype="bfloat16")
        for _ in range(5):
            figures = side.sync()
        assert 1e-4 < figures["weight_check_gap"] < 0.2
        side.sync(size=2e-3)
        with pytest.raises(WeightMismatchError, match="the weights of before"):
            side.sync(size=2e-3, spoil=version_before)


def experts_swapped(now, before):
    for name in [name for name in now if ".layers.1.mlp.experts.1." in name]:
        other = name.replace(".experts.1.", ".experts.3.")
        first = now[name].clone()
        now[name].copy_(now[other])
        now[other].copy_(first)


def test_swapped_experts_of_a_sync_are_caught_and_named(tmp_path):
    folder = make_family("Qwen3-MoE", tmp_path / "model")
    with started(folder) as control:
        side = SyncingTrainer(folder, control)
        for _ in range(3):
            assert side.sync()["weight_check_gap"] < 1e-4
        named = r"Worst: experts of layer 1 \(expert \d by [\d.]+ %, expert \d by [\d.]+ %\)\. "
        with pytest.raises(WeightMismatchError, match=named):
            side.sync(spoil=experts_swapped)
        assert side.sync()["weight_check_gap"] < 1e-4, "the next one is whole"
