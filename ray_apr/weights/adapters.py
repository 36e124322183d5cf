"""A model's parameters as the rest of the world names them: low-rank adapters are merged away.

A layer with an adapter (as peft makes them) has the parameters ``<layer>.base_layer.weight``,
``<layer>.lora_A.<adapter>.weight`` [r, in] and ``<layer>.lora_B.<adapter>.weight`` [out, r]; the
engines and Hugging Face know one ``<layer>.weight``, base + scaling * B A (2106.09685, eq. 3).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ray_apr.core.names import last_parts

_BASE = ".base_layer."


@dataclass(frozen=True, slots=True)
class MergedParameter:
    """A parameter, sharded or not, with what an adapter adds to it."""

    base: torch.Tensor
    adapters: tuple[tuple[torch.Tensor, torch.Tensor, float], ...] = ()
    """(A [r, in], B [out, r], scaling) of each adapter."""

    def full(self) -> torch.Tensor:
        """The whole value; where it is sharded, a collective of all ranks."""
        whole = _full(self.base)
        for a, b, scaling in self.adapters:
            whole = torch.addmm(whole, _full(b), _full(a), alpha=scaling)
        return whole


def merged_parameters(
    model: nn.Module, tensors: Mapping[str, torch.Tensor]
) -> dict[str, MergedParameter]:
    """Take a model's tensors under the names that it would have without adapters.

    Args:
        model: With or without adapters.
        tensors: Its parameters, or its state, by name.
    """
    layers: dict[str, Any] = {n: m for n, m in model.named_modules() if hasattr(m, "lora_A")}
    inside = tuple(f"{name}.lora_{part}." for name in layers for part in "AB")
    merged = {}
    for name, tensor in tensors.items():
        layer, _, kind = name.rpartition(_BASE)
        if layer in layers:
            adapters = _adapters(layers[layer]) if kind == "weight" else ()
            merged[f"{layer}.{kind}"] = MergedParameter(tensor, adapters)
        elif not name.startswith(inside):
            merged[name] = MergedParameter(tensor)
    return merged


def adapter_settings(model: nn.Module) -> dict[str, Any]:
    """Rank, alpha and layers of the adapters (`LoRAConfig`), as `lora_rank`, `lora_alpha` and
    `lora_layers`; for a model without any a rank of 0 alone."""
    layers: dict[str, Any] = {n: m for n, m in model.named_modules() if hasattr(m, "lora_A")}
    if not layers:
        return {"lora_rank": 0}
    first = next(iter(layers.values()))
    (rank,), (alpha,) = first.r.values(), first.lora_alpha.values()
    return {
        "lora_rank": int(rank),
        "lora_alpha": float(alpha),
        "lora_layers": last_parts(layers),
    }


def _adapters(layer: Any) -> tuple[tuple[torch.Tensor, torch.Tensor, float], ...]:
    return tuple(
        (layer.lora_A[name].weight, layer.lora_B[name].weight, float(layer.scaling[name]))
        for name in layer.active_adapters
    )


def _full(tensor: Any) -> torch.Tensor:
    """The whole of a sharded tensor; a collective for a DTensor."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.detach()
