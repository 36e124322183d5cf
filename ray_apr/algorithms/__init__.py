"""Advantages, losses and off-policy corrections as plain torch functions; names load lazily."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray_apr.algorithms.advantages import group_advantages
    from ray_apr.algorithms.corrections import (
        icepop_weights,
        importance_weights,
        rejection_mask,
    )
    from ray_apr.algorithms.losses import kl_estimate, policy_loss

__all__ = [
    "group_advantages",
    "icepop_weights",
    "importance_weights",
    "kl_estimate",
    "policy_loss",
    "rejection_mask",
]

_HOMES = {
    "group_advantages": "advantages",
    "icepop_weights": "corrections",
    "importance_weights": "corrections",
    "rejection_mask": "corrections",
    "kl_estimate": "losses",
    "policy_loss": "losses",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
