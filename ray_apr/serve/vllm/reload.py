"""Loading weights into a model whose kernels keep what they made of the weights before.

vLLM's layerwise reload gives each layer its parameters as they were before its kernels processed
them, loads these, and processes them as at the start. Here is which models need that, what it
leaves undone, and which kernels it cannot renew.

Invariants:
    * A plain ``load_weights`` is for models on GPUs whose layers are all known to compute with the
      parameters as they are loaded (`needs_reload`).
    * After `reloading` every layer has processed the weights that were loaded: MoE kernels on CPU
      are built anew, as an existing one would take them without the packing; embeddings and heads
      are packed again, as the reload leaves the old copy of tied ones.
    * A parameter that got no weights is an error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ray_apr.core.exceptions import WeightSyncError

_HOOK = "process_weights_after_loading"
_PLAIN_METHODS = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")
"""What vLLM's layers compute by, where that leaves parameters on GPUs as they are loaded."""
_PLAIN_LAYERS = ("Attention",)
"""Attention layers, whose hook sets scales that are not loaded; those of MLA keep products."""

_KEPT = ("e_score_correction_bias",)
"""Corrections of routers, which no gradient reaches: no trainer moves them, and a reload leaves
them as they are."""
_UNREPORTED = ".routed_experts."
"""A part of experts' names that vLLM 0.26 leaves out where it says what it has loaded."""


def needs_reload(model: nn.Module, device: torch.device) -> bool:
    """Whether a layer may keep something that was made of its weights.

    Args:
        model: A vLLM model.
        device: Where it computes; on CPU almost every layer packs its weights.
    """
    return device.type == "cpu" or any(_processes(module) for module in model.modules())


def _processes(module: nn.Module) -> bool:
    method = getattr(module, "quant_method", None)
    if method is not None and type(method).__name__ not in _PLAIN_METHODS:
        return True
    return hasattr(module, _HOOK) and type(module).__name__ not in _PLAIN_LAYERS


def check_kernels(model: nn.Module, device: torch.device) -> None:
    """Refuse a model with kernels that no reload renews.

    Raises:
        WeightSyncError: If there is one.
    """
    if hasattr(model, _HOOK):
        raise WeightSyncError(
            f"{type(model).__name__} keeps something made of all its weights, which vLLM's reload "
            "does not renew; it cannot be trained"
        )
    if device.type == "cpu":
        return
    for name, module in model.named_modules():
        experts = getattr(_kernel(module), "fused_experts", None)
        for base in type(experts).__mro__:
            if _HOOK not in vars(base):
                continue
            if base.__name__ != "FusedMoEExperts":
                raise WeightSyncError(
                    f"{name} computes with vLLM's {type(experts).__name__}, which processes its "
                    "weights once and not after a reload; set rollout.engine.kwargs.moe_backend "
                    'to another one, e.g. "triton"'
                )
            break


@contextlib.contextmanager
def reloading(model: nn.Module, model_config: Any, device: torch.device) -> Iterator[set[str]]:
    """While the block loads all weights, have the layers take them as at the start.

    Yields:
        A set for the names of the parameters that ``load_weights`` returns.

    Raises:
        WeightSyncError: If parameters of the model are not among them.
    """
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    if device.type == "cpu":  # on GPUs a graph may hold them; there vLLM copies into their tensors
        for module in model.modules():
            if _kernel(module) is not None:
                module.quant_method.moe_kernel = None
    initialize_layerwise_reload(model)
    wanted = parameters_to_load(model)
    loaded: set[str] = set()
    try:
        yield loaded
    finally:
        finalize_layerwise_reload(model, model_config)
        _pack_embeddings(model)
    check_loaded(model, wanted, loaded)


def check_loaded(model: nn.Module, wanted: set[str], loaded: set[str]) -> None:
    """Refuse weights that are not all of a model's.

    Args:
        model: Which they were loaded into.
        wanted: Its `parameters_to_load`.
        loaded: What ``load_weights`` returned; of fused parameters one part is enough.

    Raises:
        WeightSyncError: Names those that are missing.
    """
    missing = sorted(wanted - {_without_unreported(name) for name in loaded})
    if missing:
        raise WeightSyncError(
            f"{len(missing)} parameters got no weights: {', '.join(missing[:5])}; the names that "
            f"were sent are not those of a checkpoint of {type(model).__name__}"
        )


def _kernel(module: nn.Module) -> Any:
    """A layer's MoE kernel, if it has one."""
    return getattr(getattr(module, "quant_method", None), "moe_kernel", None)


def parameters_to_load(model: nn.Module) -> set[str]:
    """Parameters that have to be loaded: all but a head that is tied to the embedding, and what
    Transformers counts as no parameter."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    is_tied = getattr(getattr(model, "config", None), "tie_word_embeddings", False)
    heads = tuple(
        f"{name}." for name, m in model.named_modules() if is_tied and isinstance(m, ParallelLMHead)
    )
    names = (name for name, _ in model.named_parameters() if not name.startswith(heads))
    return {_without_unreported(name) for name in names if not name.endswith(_KEPT)}


def _without_unreported(name: str) -> str:
    return name.replace(_UNREPORTED, ".")


def _pack_embeddings(model: nn.Module) -> None:
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        ParallelLMHead,
        VocabParallelEmbedding,
    )

    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, VocabParallelEmbedding | ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)
