"""Compilation of what batches of many sizes go through."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., object])

logger = logging.getLogger(__name__)

_SIZE_GUARD = "triton.mix_order_reduction_non_strict_mode"


def compile_for_all_sizes(function: Function) -> Function:
    """`torch.compile`, without the guards by which a batch of another size is compiled for again.

    Sizes are variables from the first batch on, which otherwise would be compiled for alone;
    numbers such as the epsilon of a normalization stay constants, and so do the widths of a model:
    as variables they took the compiler a third of its time, also where all was compiled before.

    Inductor fuses the two reductions of a normalization's backward pass where a batch is large
    enough for it to pay (`MixOrderReduction.can_fuse`), and compiles anew for each side of three
    limits. Here they are fused always.
    """
    torch._dynamo.config.specialize_float = True
    compiled = torch.compile(function, dynamic=True, options=_options())

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for value in (*args, *kwargs.values()):
            _keep_width(value)
        return compiled(*args, **kwargs)

    return call  # type: ignore[return-value]


def compile_layer(forward: Callable[..., Any]) -> Callable[..., Any]:
    """`compile_for_all_sizes` for a layer under FSDP, which compiles once for all layers of a kind.

    FSDP hands the first layer of a unit a view of what it is called with, for which the compiler
    would compile once more; a copy costs next to nothing.
    """
    compiled = compile_for_all_sizes(forward)

    def call(*args: Any, **kwargs: Any) -> Any:
        return compiled(*map(_without_base, args), **kwargs)

    return call


def _keep_width(value: Any) -> None:
    """Tell the compiler which size is the same in all batches: the last one of hidden states and of
    rotary tables, but not of a mask, which has four axes."""
    if isinstance(value, tuple):
        for part in value:
            _keep_width(part)
    elif isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() in (2, 3):
        torch._dynamo.mark_static(value, value.dim() - 1)


def _without_base(value: Any) -> Any:
    """The same, but a copy of a view that has gradients."""
    is_view = isinstance(value, torch.Tensor) and value.requires_grad and value._is_view()
    return value.clone() if is_view else value


@lru_cache
def _options() -> dict[str, bool]:
    if _SIZE_GUARD in torch._inductor.list_options():
        return {_SIZE_GUARD: True}
    logger.warning("this PyTorch has no option %s; some batches are compiled for", _SIZE_GUARD)
    return {}
