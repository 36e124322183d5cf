"""What a module computes for a known input, in a few numbers that two processes can compare.

Functional, as engines keep weights packed, fused or scaled: what counts is what comes out.
"""

from __future__ import annotations

import functools

import torch

_NUM_PROJECTIONS = 8
_GOLDEN = 0.6180339887498949


@functools.lru_cache(maxsize=256)
def _waves(size: int, count: int, device: torch.device) -> torch.Tensor:
    """[size, count] numbers of mean square 1 without a period, the same everywhere."""
    positions = torch.arange(1, size + 1, dtype=torch.float64)[:, None]
    phases = torch.arange(1, count + 1, dtype=torch.float64)
    turns = (_GOLDEN * phases * positions * (positions + phases)).frac()
    return (2**0.5 * torch.cos(2 * torch.pi * turns)).to(device, torch.float32)


def probe_input(size: int, like: torch.Tensor) -> torch.Tensor:
    """Input [1, size] of a module, with the device and data type of its weight; it is shared, and
    not to be written to."""
    return _input(size, like.device, like.dtype)


@functools.lru_cache(maxsize=256)
def _input(size: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    return _waves(size, 1, device).T.to(dtype)


def projections(outputs_NM: torch.Tensor) -> torch.Tensor:
    """Projections [N, 8] of outputs, in float32."""
    waves = _waves(outputs_NM.shape[-1], _NUM_PROJECTIONS, outputs_NM.device)
    return outputs_NM.float() @ waves


def one_expert_each(
    num_experts: int, top_k: int, like: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choices [E, k] and weights [E, k] of a router that gives token i to expert i alone."""
    first = torch.arange(num_experts, device=like.device)[:, None]
    chosen = (first + torch.arange(top_k, device=like.device)) % num_experts
    weights = torch.zeros(num_experts, top_k, device=like.device)
    weights[:, 0] = 1
    return chosen, weights
