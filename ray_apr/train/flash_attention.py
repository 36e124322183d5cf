"""FlashAttention 4 over packed samples, from the package flash-attn-4.

Its kernels are those of FlashAttention-3 (2407.08608) on Hopper, in Python that is compiled at the
first call. They take grouped key heads, values of another head size and sliding windows as they
are. Two operators stand for them, so that the compiler of a layer keeps each whole.
"""

from __future__ import annotations

import logging
import os
import warnings
from functools import cache
from typing import Any

import torch

from ray_apr.compat.flash_attention import FLASH_ATTENTION, PACKAGE
from ray_apr.core.exceptions import one_line
from ray_apr.core.imports import installed_version

logger = logging.getLogger(__name__)

_HOPPER = 9
"""Its compute capability."""
_KEPT_COMPILED = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"
"""The package's own variable: whether compiled kernels stay on the disk for the next process."""


def why_not(device: torch.device) -> str | None:
    """Why a CUDA device cannot run the kernels, which were tried on Hopper; None if it can."""
    if installed_version(PACKAGE) is None:
        return f"needs {PACKAGE}, which is not installed"
    if torch.cuda.get_device_capability(device)[0] != _HOPPER:
        return "needs a Hopper GPU"
    try:
        _kernels()
    except Exception as error:  # noqa: BLE001  (its import runs code that fails in any way)
        reason = f"{PACKAGE} is installed, and cannot be used: {one_line(error)}"
        logger.warning(reason)  # with `attention: auto` PyTorch's runs in its place
        return reason
    return None


@cache
def _kernels() -> tuple[Any, Any]:
    """The functions of the package: forward and backward.

    Raises:
        PrivateNameError: If it has them not.
        ImportError: If it lacks what it needs.
    """
    os.environ.setdefault(_KEPT_COMPILED, "1")
    # of each of its kernels, for a part that they do not use
    warnings.filterwarnings("ignore", "Argument aux_data", UserWarning)
    return FLASH_ATTENTION.get("_flash_attn_fwd"), FLASH_ATTENTION.get("_flash_attn_bwd")


@torch.library.custom_op("ray_apr::flash_attention", mutates_args=())
def flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    boundaries: torch.Tensor,
    longest: int,
    scale: float | None,
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention within each sample of a packed row.

    Args:
        query: [L, heads, head size], of half precision, on Hopper.
        key: [L, key heads, head size].
        value: [L, key heads, value size].
        boundaries: `Packing.boundaries`.
        longest: `Packing.longest`.
        scale: Factor of the scores; None: 1 / sqrt(head size).
        window: Tokens that a token sees before itself; None: all.

    Returns:
        [L, heads, value size], and the log of each softmax's sum [heads, L].
    """
    forward, _ = _kernels()
    found = forward(
        query, key, value, return_lse=True, **_options(boundaries, longest, scale, window)
    )
    return found[0], found[1]


@flash_attention.register_fake
def _(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    length, heads, _size = query.shape
    sums = query.new_empty((heads, length), dtype=torch.float32)
    return query.new_empty((length, heads, value.shape[-1])), sums


@torch.library.custom_op("ray_apr::flash_attention_backward", mutates_args=())
def _backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    sums: torch.Tensor,
    boundaries: torch.Tensor,
    longest: int,
    scale: float | None,
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of `query`, `key` and `value`, of their shapes."""
    options = _options(boundaries, longest, scale, window)
    options["deterministic"] = torch.are_deterministic_algorithms_enabled()
    _, backward = _kernels()
    found = backward(query, key, value, out, gradient, sums, **options)
    return found[0], found[1], found[2]


@_backward.register_fake
def _(
    gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _options(
    boundaries: torch.Tensor, longest: int, scale: float | None, window: int | None
) -> dict[str, Any]:
    """What both kernels are told of a row."""
    return {
        "softmax_scale": scale,
        "causal": True,
        "window_size_left": window,
        "cu_seqlens_q": boundaries,
        "cu_seqlens_k": boundaries,
        "max_seqlen_q": longest,
        "max_seqlen_k": longest,
    }


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    query, key, value, boundaries, *ctx.rest = inputs
    ctx.save_for_backward(query, key, value, *output, boundaries)


def _differentiate(ctx: Any, gradient: torch.Tensor, _of_sums: Any) -> tuple[Any, ...]:
    gradients = _backward(gradient.contiguous(), *ctx.saved_tensors, *ctx.rest)
    return (*gradients, None, None, None, None)


flash_attention.register_autograd(_differentiate, setup_context=_keep)
