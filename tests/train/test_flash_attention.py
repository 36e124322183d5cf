"""FlashAttention 4's operators, with kernels that compute what the package's do."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from transformers.utils.generic import is_flash_attention_requested

from ray_apr.core.exceptions import ConfigError
from ray_apr.train import attention, flash_attention

LENGTHS = (5, 1, 9)


def weights_of(query, key, boundaries, scale, window):
    """Attention weights [heads, L, L], the logs of their sums [heads, L], and the scale."""
    scale = scale or query.shape[-1] ** -0.5
    scores = scale * torch.einsum("qhd,khd->hqk", query, key)
    place = torch.arange(len(query))
    sample = torch.bucketize(place, boundaries[1:], right=True)
    behind = place[:, None] - place
    seen = (sample[:, None] == sample) & (behind >= 0)
    if window is not None:
        seen &= behind <= window
    scores = scores.masked_fill(~seen, float("-inf"))
    return scores.softmax(-1), scores.logsumexp(-1), scale


def of_each_head(query, grouped):
    """Key heads, one for each head of the queries."""
    return grouped.repeat_interleave(query.shape[1] // grouped.shape[1], 1)


class Kernels:
    """The two functions of the package that are called."""

    def __init__(self):
        self.deterministic = []

    def forward(
        self, q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale,
        causal, window_size_left, return_lse,
    ):  # fmt: skip
        assert causal and return_lse and q.is_contiguous() and max_seqlen_q == max_seqlen_k == 9
        assert cu_seqlens_q is cu_seqlens_k
        k, v = of_each_head(q, k), of_each_head(q, v)
        weights, sums, _ = weights_of(q, k, cu_seqlens_q, softmax_scale, window_size_left)
        return torch.einsum("hqk,khd->qhd", weights, v), sums, None, None, None

    def backward(
        self, q, k, v, out, dout, lse, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        softmax_scale, causal, window_size_left, deterministic,
    ):  # fmt: skip
        self.deterministic.append(deterministic)
        assert causal and max_seqlen_q == max_seqlen_k == 9
        keys, values = of_each_head(q, k), of_each_head(q, v)
        weights, sums, scale = weights_of(q, keys, cu_seqlens_q, softmax_scale, window_size_left)
        torch.testing.assert_close(sums, lse)
        torch.testing.assert_close(torch.einsum("hqk,khd->qhd", weights, values), out)
        of_weights = torch.einsum("qhd,khd->hqk", dout, values)
        mean = (of_weights * weights).sum(-1, keepdim=True)
        of_scores = scale * weights * (of_weights - mean)
        dq = torch.einsum("hqk,khd->qhd", of_scores, keys)
        dk = torch.einsum("hqk,qhd->khd", of_scores, q)
        dv = torch.einsum("hqk,qhd->khd", weights, dout)
        dk, dv = (d.unflatten(1, (k.shape[1], -1)).sum(2) for d in (dk, dv))
        return dq, dk, dv


@pytest.fixture
def kernels(monkeypatch):
    found = Kernels()
    monkeypatch.setattr(flash_attention, "_kernels", lambda: (found.forward, found.backward))
    return found


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("window", [None, 3])
def test_packed_samples_see_themselves_alone(kernels, window, compiled):
    """With grouped heads and smaller values, against PyTorch's attention of one at a time."""
    torch.manual_seed(0)
    packing = attention.Packing.of(torch.tensor(LENGTHS).numpy())
    shapes = ((4, 8), (2, 8), (2, 6))
    inputs = [torch.randn(1, h, sum(LENGTHS), d, requires_grad=True) for h, d in shapes]
    call = attention.flash_4_attention
    if compiled:
        call = torch.compile(call, backend="aot_eager", fullgraph=True)
    out, weights = call(
        None, *inputs, None, scaling=0.4, sliding_window=window, **packing.arguments()
    )
    assert weights is None and out.shape == (1, sum(LENGTHS), 4, 6)
    gradient = torch.randn_like(out)
    gradients = torch.autograd.grad(out, inputs, gradient)
    begin, expected = 0, []
    for length in LENGTHS:
        q, k, v = (t[:, :, begin : begin + length] for t in inputs)
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        if window is not None:
            mask &= ~torch.ones_like(mask).tril(-window)
        alone = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.4, enable_gqa=True)
        expected.append(alone.transpose(1, 2))
        begin += length
    torch.testing.assert_close(out, torch.cat(expected, 1))
    for found, true in zip(
        gradients, torch.autograd.grad(torch.cat(expected, 1), inputs, gradient), strict=True
    ):
        torch.testing.assert_close(found, true)
    assert kernels.deterministic == [False]


def test_the_kernels_are_deterministic_where_pytorch_is(kernels):
    query = torch.randn(9, 2, 8, requires_grad=True)
    out, _ = flash_attention.flash_attention(
        query, query, query, torch.tensor([0, 9], dtype=torch.int32), 9, None, None
    )
    torch.use_deterministic_algorithms(True)
    try:
        out.sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert kernels.deterministic == [True]


@pytest.fixture
def cuda(monkeypatch):
    """Hopper, with the package, whose kernels can be imported; what a test takes away is not."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(flash_attention, "installed_version", lambda _: "4.0.0")
    monkeypatch.setattr(flash_attention, "_kernels", lambda: (None, None))
    return torch.device("cuda")


def broken(error):
    def kernels():
        raise error

    return kernels


WITHOUT = {
    "Hopper": (torch.cuda, "get_device_capability", lambda _: (8, 0)),
    "is not installed": (flash_attention, "installed_version", lambda _: None),
    "cannot be used: no _cutlass_ir": (
        flash_attention,
        "_kernels",
        broken(ImportError("no _cutlass_ir")),
    ),
    "cannot be used: unexpected keyword": (  # of a decorator of another cutlass
        flash_attention,
        "_kernels",
        broken(TypeError("unexpected keyword")),
    ),
}


def test_flash_attention_runs_where_it_can(cuda):
    for asked, name in {
        "auto": attention.FLASH,
        "flash_attention_4": attention.FLASH,
        "torch": attention.VARLEN,
    }.items():
        found = attention.attention_name(cuda, torch.bfloat16, packed=True, attention=asked)
        assert found == name


@pytest.mark.parametrize("reason", WITHOUT)
def test_pytorchs_attention_runs_where_it_cannot(monkeypatch, caplog, cuda, reason):
    monkeypatch.setattr(*WITHOUT[reason])
    assert attention.attention_name(cuda, torch.bfloat16, packed=True) == attention.VARLEN
    assert (reason in caplog.text) == ("cannot" in reason), "a broken package is told"
    with pytest.raises(ConfigError, match=rf"train\.attention.*{reason}.*leave it out"):
        attention.attention_name(cuda, torch.bfloat16, packed=True, attention="flash_attention_4")


def test_nothing_asks_cuda_where_the_package_is_not_installed(monkeypatch):
    def asked(_):
        raise AssertionError("a build without CUDA cannot answer")

    monkeypatch.setattr(torch.cuda, "get_device_capability", asked)
    monkeypatch.setattr(flash_attention, "installed_version", lambda _: None)
    reason = flash_attention.why_not(torch.device("cuda"))
    assert reason == "needs flash-attn-4, which is not installed"


@pytest.mark.parametrize(("dtype", "packed"), [(torch.float32, True), (torch.bfloat16, False)])
def test_padded_and_float32_rows_have_another_attention(cuda, dtype, packed):
    assert attention.attention_name(cuda, dtype, packed=packed) == "sdpa"
    with pytest.raises(ConfigError, match=r"train\.attention.*packed samples in bfloat16"):
        attention.attention_name(cuda, dtype, packed=packed, attention="flash_attention_4")


@pytest.mark.parametrize("name", [attention.FLASH, attention.VARLEN])
def test_transformers_does_not_look_for_kernels_of_its_own(name):
    assert not is_flash_attention_requested(requested_attention_implementation=name)
