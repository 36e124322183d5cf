"""Every family in the trainer: its attention over packed rows, gradients, adapters."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from ray_apr.config import LoRAConfig, TrainConfig
from ray_apr.core.architectures import SUPPORTED
from ray_apr.train import attention
from ray_apr.train.checkpoint import full_parameters
from ray_apr.train.fsdp import build_model
from ray_apr.train.logprobs import micro_batches, response_logprobs
from tests.families import FAMILIES, architecture_of, make_family
from tests.train_batches import make_batches, make_samples, process_group

CPU = torch.device("cpu")


def varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, *, scale=None, window_size=(-1, -1), **options):
    """What PyTorch's variable-length attention computes, one sample at a time."""
    assert set(options) <= {"enable_gqa"} and (max_q, cu_q is cu_k) == (max_k, True)
    assert q.shape[-1] == k.shape[-1] == v.shape[-1], "flash attention has one size of heads"
    left, right = window_size
    assert right == 0
    out = []
    for begin, end in zip(cu_q[:-1].tolist(), cu_q[1:].tolist(), strict=True):
        one = [t[begin:end].transpose(0, 1)[None] for t in (q, k, v)]
        distance = torch.arange(end - begin)[:, None] - torch.arange(end - begin)
        mask = (distance >= 0) & ((left < 0) | (distance <= left))
        grouped = q.shape[1] != k.shape[1]
        seen = F.scaled_dot_product_attention(*one, attn_mask=mask, scale=scale, enable_gqa=grouped)
        out.append(seen[0].transpose(0, 1))
    return torch.cat(out)


@pytest.mark.parametrize("family", [f for f in FAMILIES if architecture_of(f) in SUPPORTED])
def test_the_attention_of_gpus_computes_what_the_exact_mask_does(tmp_path, monkeypatch, family):
    """Windows, scales and groups reach it, of every family's layers; known fault: so did DeepSeek's
    values, whose heads are smaller, which it does not take."""
    folder = make_family(family, tmp_path / "model")
    (row,) = make_batches(make_samples(longest=40), micro_batch_tokens=4096, packed=True)
    (part,) = micro_batches(row, CPU, packed=True)
    with process_group(tmp_path), torch.no_grad():
        exact, _ = response_logprobs(build_model(str(folder), TrainConfig(), CPU), part)
        monkeypatch.setattr(attention, "varlen_attn", varlen_attn)
        monkeypatch.setattr(
            "ray_apr.train.fsdp.attention_name",
            lambda *_, **__: attention.attention_name(
                torch.device("cuda"), torch.bfloat16, packed=True, attention="torch"
            ),
        )
        model = build_model(str(folder), TrainConfig(), CPU)
        assert model.config._attn_implementation == attention.VARLEN
        found, _ = response_logprobs(model, part)
    torch.testing.assert_close(found, exact, atol=2e-5, rtol=0)


@pytest.mark.parametrize("family", ["Mixtral", "Qwen3-MoE", "OLMoE", "Qwen2-MoE"])
def test_every_parameter_of_a_mixture_learns(tmp_path, family):
    folder = make_family(family, tmp_path / "model")
    with process_group(tmp_path):
        model = build_model(str(folder), TrainConfig(), CPU)
        (row,) = make_batches(make_samples(), micro_batch_tokens=4096)
        (part,) = micro_batches(row, CPU)
        response_logprobs(model, part)[0].sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name


def test_a_mixture_with_adapters_is_its_checkpoint_to_everyone_else(tmp_path):
    folder = make_family("Mixtral", tmp_path / "model")
    checkpoint = load_file(folder / "model.safetensors")
    train = TrainConfig(lora=LoRAConfig(rank=2, target_modules=["q_proj", "o_proj"]))
    with process_group(tmp_path):
        model = build_model(str(folder), train, CPU)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if ".lora_B." in name:
                    parameter.normal_()
        merged = dict(full_parameters(model))
    assert merged.keys() == checkpoint.keys()
    changed = {name for name in merged if not torch.equal(merged[name], checkpoint[name])}
    assert changed == {n for n in checkpoint if "q_proj" in n or "o_proj" in n}
