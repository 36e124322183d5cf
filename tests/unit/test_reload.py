"""Which engines reload layer by layer, and which kernels are refused (serve/vllm/reload.py)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ray_apr.core.exceptions import WeightSyncError
from ray_apr.serve.vllm.reload import check_kernels, needs_reload

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class UnquantizedLinearMethod:
    """Named like vLLM's."""


class Fp8LinearMethod:
    """Named like vLLM's."""


class FusedMoEExperts:
    """vLLM's base class, whose hook does nothing."""

    def process_weights_after_loading(self, layer) -> None: ...


class TritonExperts(FusedMoEExperts):
    """Computes with the weights as they are."""


class ShufflingExperts(FusedMoEExperts):
    """Keeps weights in an order of its own."""

    def process_weights_after_loading(self, layer) -> None: ...


class ShufflingExpertsOfAnotherShape(ShufflingExperts): ...


class Attention(nn.Module):
    """Named like vLLM's."""

    def process_weights_after_loading(self, dtype) -> None: ...


class MLAAttention(Attention):
    """Keeps products of its weights."""


def layer(method):
    module = nn.Linear(2, 2)
    module.quant_method = method
    return module


def mixture(experts):
    kernel = SimpleNamespace(fused_experts=experts)
    return layer(SimpleNamespace(moe_kernel=kernel))


def test_on_cpu_every_model_is_reloaded():
    assert needs_reload(nn.Linear(2, 2), CPU)


@pytest.mark.parametrize(
    ("part", "reloads"),
    [
        (layer(UnquantizedLinearMethod()), False),
        (Attention(), False),
        (nn.LayerNorm(2), False),
        (layer(Fp8LinearMethod()), True),
        (mixture(TritonExperts()), True),
        (MLAAttention(), True),
    ],
)
def test_on_gpus_a_model_is_reloaded_unless_all_its_layers_are_known_to_be_plain(part, reloads):
    model = nn.Sequential(layer(UnquantizedLinearMethod()), part)
    assert needs_reload(model, CUDA) == reloads


def test_kernels_that_process_weights_once_are_refused_on_gpus():
    check_kernels(nn.Sequential(mixture(TritonExperts()), layer(None)), CUDA)
    for experts in (ShufflingExperts(), ShufflingExpertsOfAnotherShape()):
        model = nn.Sequential(mixture(experts))
        with pytest.raises(
            WeightSyncError, match=f"{type(experts).__name__}, which.*kwargs.moe_backend"
        ):
            check_kernels(model, CUDA)
        check_kernels(model, CPU)


def test_a_model_that_processes_its_weights_as_a_whole_is_refused():
    with pytest.raises(WeightSyncError, match="MLAAttention keeps something"):
        check_kernels(MLAAttention(), CPU)
