"""Variable-length attention on CUDA against one sample at a time."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from ray_apr.train.attention import VARLEN, attention_name
from ray_apr.train.head import attach_response_logprobs
from ray_apr.train.logprobs import micro_batches, response_logprobs
from tests.tiny_model import make_tiny_model
from tests.train_batches import make_batches, make_samples

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_packed_flash_attention_equals_padded_attention(tmp_path):
    folder = make_tiny_model(tmp_path / "model", hidden_size=64)
    device = torch.device("cuda")
    name = attention_name(device, torch.bfloat16, packed=True)
    assert name == VARLEN
    found = {}
    for attention, packed in (("sdpa", False), (name, True)):
        model = AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation=attention, dtype=torch.bfloat16
        ).to(device)
        attach_response_logprobs(model)
        (row,) = make_batches(make_samples(), micro_batch_tokens=4096, packed=packed)
        (part,) = micro_batches(row, device, packed=packed)
        assert part.input_ids.shape[0] == (1 if packed else 16)
        logprobs, _ = response_logprobs(model, part)
        (logprobs * part.mask).sum().backward()
        gradient = torch.cat([p.grad.flatten().float() for p in model.parameters()])
        order = part.sample_index.argsort()
        found[packed] = (logprobs.detach()[order], gradient)
    (padded, padded_gradient), (flat, gradient) = found[False], found[True]
    assert (padded - flat).abs().max() < 0.1, "bfloat16 rounds"
    assert (gradient - padded_gradient).norm() < 0.03 * padded_gradient.norm()
