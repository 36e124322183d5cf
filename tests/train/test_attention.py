from __future__ import annotations

import pytest
import torch

from ray_apr.core.exceptions import ConfigError
from ray_apr.train import attention


def test_a_sliding_window_is_refused_where_pytorch_has_none(monkeypatch):
    seen = []

    def old_varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, is_causal=False, scale=None):
        seen.append((is_causal, k.shape[1]))
        return q

    monkeypatch.setattr(attention, "varlen_attn", old_varlen_attn)
    monkeypatch.setattr(attention, "_PARAMETERS", {"is_causal"})
    q, k = torch.zeros(1, 2, 6, 4), torch.zeros(1, 1, 6, 4)
    out, _ = attention.varlen_attention(torch.nn.Identity(), q, k, k, None)
    assert out.shape == (1, 6, 2, 4) and seen == [(True, 2)], "the key head stands for two"
    with pytest.raises(ConfigError, match=r"train\.packing.*sliding window"):
        attention.varlen_attention(torch.nn.Identity(), q, k, k, None, sliding_window=3)


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
