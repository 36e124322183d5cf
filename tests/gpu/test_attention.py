"""Attention over packed samples on CUDA, against padded ones and against float32."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ray_apr.compat.flash_attention import PACKAGE
from ray_apr.config import TrainConfig
from ray_apr.core.architectures import SUPPORTED
from ray_apr.core.imports import installed_version
from ray_apr.train.attention import FLASH, VARLEN
from ray_apr.train.fsdp import build_model
from ray_apr.train.logprobs import micro_batches, response_logprobs
from ray_apr.train.tensors import local_tensor
from tests.families import FAMILIES, architecture_of, make_family
from tests.train_batches import make_batches, make_samples, process_group

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
NAMES = {"torch": VARLEN, "flash_attention_4": FLASH}
LONGEST = 40
"""Tokens of a response: more than the sliding windows of the families have."""


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    torch.cuda.set_device(0)
    with process_group(tmp_path_factory.mktemp("rank"), backend="cpu:gloo,cuda:nccl"):
        yield


def scored(folder: Path, train: TrainConfig) -> tuple[torch.Tensor, torch.Tensor, str]:
    """Log-probs of responses [16, T], the gradient of their sum, and the attention's name."""
    device, packed = torch.device("cuda"), train.packs("cuda")
    model = build_model(str(folder), train, device)
    samples = make_samples(longest=LONGEST)
    (row,) = make_batches(samples, micro_batch_tokens=4096, packed=packed)
    (part,) = micro_batches(row, device, packed=packed)
    assert part.input_ids.shape[0] == (1 if packed else len(samples))
    logprobs, _ = response_logprobs(model, part)
    (logprobs * part.mask).sum().backward()
    gradients = [local_tensor(p.grad) for p in model.parameters() if p.grad is not None]
    gradient = torch.cat([g.flatten().float() for g in gradients])
    return (
        logprobs.detach()[part.sample_index.argsort()],
        gradient,
        model.config._attn_implementation,
    )


@pytest.mark.parametrize("family", [f for f in FAMILIES if architecture_of(f) in SUPPORTED])
def test_packed_attention_rounds_as_padded_attention_does(tmp_path, family):
    """In bfloat16, of the same weights: what differs from float32 is no more than padded rows'."""
    folder = make_family(family, tmp_path / "model")
    settings = {"learning_rate": 1e-3, "compile": False}
    exact, exact_gradient, _ = scored(folder, TrainConfig(
        packing="padded", param_dtype="float32", **settings
    ))  # fmt: skip
    logprobs, gradient, _ = scored(folder, TrainConfig(
        packing="padded", param_dtype="bfloat16", **settings
    ))  # fmt: skip
    off = (logprobs - exact).abs().mean()
    off_gradient = (gradient - exact_gradient).norm()
    for attention in NAMES:
        if attention == "flash_attention_4" and installed_version(PACKAGE) is None:
            continue
        packed = TrainConfig(packing="packed", attention=attention, **settings)
        found, its_gradient, name = scored(folder, packed)
        assert name == NAMES[attention]
        assert (found - exact).abs().mean() < 1.1 * off, attention
        assert (its_gradient - exact_gradient).norm() < 1.1 * off_gradient, attention
