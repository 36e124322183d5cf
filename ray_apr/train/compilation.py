"""Compilation of what batches of many sizes go through."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import lru_cache
from typing import TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., object])

logger = logging.getLogger(__name__)

_SIZE_GUARD = "triton.mix_order_reduction_non_strict_mode"


def compile_for_all_sizes(function: Function) -> Function:
    """`torch.compile`, without the guards by which a batch of another size is compiled for again.

    Sizes are variables from the first batch on, which otherwise would be compiled for alone;
    numbers such as the epsilon of a normalization stay constants.

    Inductor fuses the two reductions of a normalization's backward pass where a batch is large
    enough for it to pay (`MixOrderReduction.can_fuse`), and compiles anew for each side of three
    limits. Here they are fused always.
    """
    torch._dynamo.config.specialize_float = True
    return torch.compile(function, dynamic=True, options=_options())  # type: ignore[return-value]


@lru_cache
def _options() -> dict[str, bool]:
    if _SIZE_GUARD in torch._inductor.list_options():
        return {_SIZE_GUARD: True}
    logger.warning("this PyTorch has no option %s; some batches are compiled for", _SIZE_GUARD)
    return {}
