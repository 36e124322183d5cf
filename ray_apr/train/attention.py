"""Attention over packed samples: each sees itself alone.

On CUDA in half precision a variable-length flash attention runs, PyTorch's or that of the package
flash-attn-4, which costs what the samples cost one by one. Anywhere else Transformers makes an
exact block mask of the position ids.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.varlen import varlen_attn

from ray_apr.config.train import Attention
from ray_apr.core.checks import require
from ray_apr.train import flash_attention

VARLEN = "ray_apr_varlen"
"""Name of PyTorch's attention over packed samples in Transformers' registry."""
FLASH = "ray_apr_fa4"
"""Name of FlashAttention 4 there; Transformers takes one with the word "flash" for its own."""
_PARAMETERS = inspect.signature(varlen_attn).parameters


@dataclass(frozen=True, slots=True)
class Packing:
    """Where the samples of a packed row lie."""

    position_ids: torch.Tensor
    """[1, L], from 0 on in each sample."""
    boundaries: torch.Tensor
    """[N + 1], int32: sample i has the tokens boundaries[i] ... boundaries[i + 1] - 1."""
    longest: int
    """Tokens of the longest sample."""

    @classmethod
    def of(cls, lengths: np.ndarray) -> Packing:
        """Packing of samples of these lengths [N], in tokens."""
        ends = np.cumsum(lengths)
        positions = np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)
        boundaries = np.concatenate(([0], ends)).astype(np.int32)
        return cls(
            position_ids=torch.from_numpy(positions[None]),
            boundaries=torch.from_numpy(boundaries),
            longest=int(lengths.max()),
        )

    def tensors(self) -> dict[str, torch.Tensor]:
        """What a device has to have of it, by field."""
        return {"position_ids": self.position_ids, "boundaries": self.boundaries}

    def arguments(self) -> dict[str, Any]:
        """Arguments of a Transformers model; the names are those of its flash attention."""
        return {
            "position_ids": self.position_ids,
            "cu_seq_lens_q": self.boundaries,
            "cu_seq_lens_k": self.boundaries,
            "max_length_q": self.longest,
            "max_length_k": self.longest,
        }


def attention_name(
    device: torch.device, dtype: torch.dtype, *, packed: bool, attention: Attention = "auto"
) -> str:
    """The attention that suits a device: one of ours for packed rows on CUDA in half precision.

    Registers it with Transformers.

    Args:
        device: Where attention is computed.
        dtype: Data type of its inputs.
        packed: Whether rows are packed.
        attention: `TrainConfig.attention`.

    Raises:
        ConfigError: Where FlashAttention 4 is asked for, and cannot run.
    """
    half = dtype in (torch.bfloat16, torch.float16)
    is_ours = packed and device.type == "cuda" and half
    why_not: str | None = "needs packed samples in bfloat16 on a Hopper GPU"
    if is_ours and attention != "torch":
        why_not = flash_attention.why_not(device)
    asked = attention == "flash_attention_4"
    require(not (asked and why_not), "train.attention", attention, f"{why_not}; leave it out")
    if not is_ours:
        return "sdpa"
    from transformers import AttentionInterface

    flashes = why_not is None
    name, function = (FLASH, flash_4_attention) if flashes else (VARLEN, varlen_attention)
    # no mask goes with it: to see which one, Transformers would wait for the device
    AttentionInterface.register(name, function)
    return name


def _packed(kernel: Callable[..., torch.Tensor]) -> Callable[..., tuple[torch.Tensor, None]]:
    """Causal attention within each sample of a packed row, as Transformers calls it.

    Args:
        kernel: Computes it of queries, keys and values [L, heads, head size], the boundaries, the
            longest sample, the scale, and how many tokens before itself a token sees.
    """

    def attention(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        scaling: float | None = None,
        cu_seq_lens_q: torch.Tensor | None = None,
        max_length_q: int | None = None,
        sliding_window: int | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        """Of one layer.

        Args:
            module: The attention layer.
            query: [1, heads, L, head size].
            key: [1, key heads, L, head size].
            value: Like `key`; its heads may be smaller, as with a latent attention.
            attention_mask: Not used; there is none.
            scaling: Factor of the scores.
            cu_seq_lens_q: `Packing.boundaries`; None: the row is one sample.
            max_length_q: `Packing.longest`.
            sliding_window: Tokens that a token sees, itself included; None: all before it.

        Returns:
            [1, L, heads, head size of `value`], and no attention weights.
        """
        length = query.shape[2]
        if cu_seq_lens_q is None:
            cu_seq_lens_q = torch.tensor([0, length], dtype=torch.int32, device=query.device)
        rows = (t[0].transpose(0, 1) for t in (query, key, value))
        window = None if sliding_window is None else sliding_window - 1
        out = kernel(*rows, cu_seq_lens_q, max_length_q or length, scaling, window)
        return out[None], None

    return attention


def _by_pytorch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    boundaries: torch.Tensor,
    longest: int,
    scale: float | None,
    window: int | None,
) -> torch.Tensor:
    """PyTorch's variable-length attention."""
    groups = query.shape[1] // key.shape[1]
    size = value.shape[-1]
    num_missing = query.shape[-1] - size
    if num_missing:  # it has one size for all heads
        value = F.pad(value, (0, num_missing))
    options: dict[str, Any] = {"window_size": (-1 if window is None else window, 0)}
    if groups > 1 and "enable_gqa" in _PARAMETERS:
        options["enable_gqa"] = True
    elif groups > 1:
        key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
    out = varlen_attn(
        query.contiguous(),
        key.contiguous(),
        value.contiguous(),
        boundaries,
        boundaries,
        longest,
        longest,
        scale=scale,
        **options,
    )
    assert isinstance(out, torch.Tensor)
    return out[..., :size]


def _by_flash_4(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *of_row: Any
) -> torch.Tensor:
    """FlashAttention 4."""
    rows = (t.contiguous() for t in (query, key, value))
    return flash_attention.flash_attention(*rows, *of_row)[0]


varlen_attention = _packed(_by_pytorch)
flash_4_attention = _packed(_by_flash_4)
