from __future__ import annotations

import pytest
import torch
import torch.nn.attention.varlen

from ray_apr.exceptions import ConfigError
from ray_apr.train.attention import varlen_attention


def test_a_sliding_window_is_refused_where_pytorch_has_none(monkeypatch):
    seen = []

    def old_varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, is_causal=False, scale=None):
        seen.append(is_causal)
        return q

    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", old_varlen_attn)
    q = torch.zeros(1, 2, 6, 4)
    out, _ = varlen_attention(torch.nn.Identity(), q, q, q, None)
    assert out.shape == (1, 6, 2, 4) and seen == [True]
    with pytest.raises(ConfigError, match=r"train\.packing.*sliding window"):
        varlen_attention(torch.nn.Identity(), q, q, q, None, sliding_window=3)
