"""What crosses the wire: the tensors of a checkpoint, and where each lies in a model's parameters.

Transformers may keep a model under other names and in other shapes than its checkpoint has: all
experts of a layer in one parameter, modules renamed. Engines read checkpoints. The conversion that
Transformers does when it saves is run once, on tensors without data, and what comes out is read off
as ranges of the parameters.

Invariants:
    * Names and shapes are those that ``save_pretrained`` writes.
    * Each element of a parameter is in exactly one tensor, and each tensor is a range of one
      parameter. A model that needs more to be saved (a transpose, several parameters put together)
      is refused.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ray_apr.core.exceptions import WeightSyncError


@dataclass(frozen=True, slots=True)
class WireTensor:
    """A tensor of a checkpoint: a range of a parameter that lies row after row."""

    name: str
    shape: tuple[int, ...]
    source: str
    """Name of the parameter in the model, without adapters."""
    begin: int
    """Elements of the parameter before it."""

    @property
    def end(self) -> int:
        """Elements of the parameter up to its end."""
        return self.begin + math.prod(self.shape)

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """This tensor, out of the whole parameter; a view if that is contiguous."""
        return whole.reshape(-1)[self.begin : self.end].view(self.shape)


def wire_tensors(model: Any, shapes: Mapping[str, Sequence[int]]) -> tuple[WireTensor, ...]:
    """Take a model's tensors apart as its checkpoint has them.

    Args:
        model: A Hugging Face model; any other module's names and shapes are taken as they are.
        shapes: Of its parameters, or of its state, by their names without adapters.

    Returns:
        In the order of the parameters.

    Raises:
        WeightSyncError: If a tensor of the checkpoint is no range of one parameter.
    """
    sources = {n: torch.empty(tuple(shape), device="meta") for n, shape in shapes.items()}
    owners = {_storage(tensor): name for name, tensor in sources.items()}
    found: dict[str, list[WireTensor]] = {name: [] for name in sources}
    for name, tensor in _as_saved(model, sources).items():
        source = owners.get(_storage(tensor))
        if source is None or not tensor.is_contiguous():
            raise WeightSyncError(
                f"tensor {name} of {type(model).__name__}'s checkpoint is made of its parameters "
                "by more than cutting them; such weights are not synced"
            )
        begin = tensor.storage_offset()
        found[source].append(WireTensor(name, tuple(tensor.shape), source, begin))
    for source, tensors in found.items():
        tensors.sort(key=lambda tensor: tensor.begin)
        ends = [0, *(tensor.end for tensor in tensors)]
        if [t.begin for t in tensors] != ends[:-1] or ends[-1] != sources[source].numel():
            raise WeightSyncError(
                f"the tensors {[t.name for t in tensors]} of {type(model).__name__}'s checkpoint "
                f"do not make up its parameter {source}; such weights are not synced"
            )
    return tuple(tensor for tensors in found.values() for tensor in tensors)


def _as_saved(model: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors under the names and in the shapes of the checkpoint: views of the given ones, where
    that is possible."""
    from transformers import PreTrainedModel

    is_old = importlib.util.find_spec("transformers.core_model_loading") is None
    if is_old or not isinstance(model, PreTrainedModel):  # models of 4 are as their checkpoints
        return tensors
    from ray_apr.compat.transformers import revert_weight_conversion

    with _NoCopies():
        saved: dict[str, torch.Tensor] = revert_weight_conversion(model, dict(tensors))
    return saved


class _NoCopies(TorchDispatchMode):
    """Context in which a copy of a tensor, made to have its elements in order, is the tensor."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        del types
        if func is torch.ops.aten.clone.default:
            return args[0].view_as(args[0])
        return func(*args, **(kwargs or {}))


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
