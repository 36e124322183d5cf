from __future__ import annotations

import torch

from ray_apr.train import attention


def test_key_heads_are_copied_where_pytorch_does_not_share_them(monkeypatch):
    """As before PyTorch 2.12."""
    seen = []

    def old_varlen_attn(q, k, *_, scale=None, window_size=(-1, -1)):
        seen.append((k.shape[1], window_size))
        return q

    monkeypatch.setattr(attention, "varlen_attn", old_varlen_attn)
    monkeypatch.setattr(attention, "_PARAMETERS", {"window_size"})
    q, k = torch.zeros(1, 2, 6, 4), torch.zeros(1, 1, 6, 4)
    out, _ = attention.varlen_attention(torch.nn.Identity(), q, k, k, None, sliding_window=3)
    assert out.shape == (1, 6, 2, 4) and seen == [(2, (2, 0))], "the key head stands for two"


def test_key_heads_are_not_copied_where_pytorch_shares_them(monkeypatch):
    seen = []

    def new_varlen_attn(q, k, *_, scale=None, window_size=(-1, -1), enable_gqa=False):
        seen.append((k.shape[1], window_size, enable_gqa))
        return q

    monkeypatch.setattr(attention, "varlen_attn", new_varlen_attn)
    monkeypatch.setattr(attention, "_PARAMETERS", {"window_size", "enable_gqa"})
    q, k = torch.zeros(1, 2, 6, 4), torch.zeros(1, 1, 6, 4)
    attention.varlen_attention(torch.nn.Identity(), q, k, k, None, sliding_window=3)
    attention.varlen_attention(torch.nn.Identity(), q, q, q, None)
    assert seen == [(1, (2, 0), True), (2, (-1, 0), False)]
