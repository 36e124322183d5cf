"""Loading weights the second time: the copies of the first time, and nothing else.

A model's ``load_weights`` walks through names and shards in Python, which on a GPU takes longer
than the bytes do. But what it does with a buffer of weights is, as a rule, to copy parts of it into
parameters; the same parts each time. `CopyRecorder` writes these copies down while
``load_weights`` runs, and `replay` does them again.

Invariants:
    * A recording counts only if nothing but views and such copies ever saw the buffer: where
      a loader computes with what it loads, `CopyRecorder.copies` is None, and every load is a
      whole one.
    * What a loader does besides, such as filling padding with zeros, does not depend on the buffer,
      and holds from the first time on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Copies = tuple[list[torch.Tensor], list[torch.Tensor]]
"""Where to, and where from: views of parameters, and of the buffer."""

_COPY = torch.ops.aten.copy_.default


class CopyRecorder(TorchDispatchMode):
    """Context in which a loader's copies out of a buffer are written down.

    Args:
        buffer: What is loaded; its storage stays where it is for as long as copies are replayed.
        parameters: What may be loaded into; their storages stay, too.
    """

    def __init__(self, buffer: torch.Tensor, parameters: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._source = _storage(buffer)
        self._targets = {_storage(parameter) for parameter in parameters}
        self._to: list[torch.Tensor] = []
        self._from: list[torch.Tensor] = []
        self._is_replayable = True

    @property
    def copies(self) -> Copies | None:
        """What to replay; None if the loader did more than to copy."""
        return (self._to, self._from) if self._is_replayable else None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        del types
        result = func(*args, **(kwargs or {}))
        if not any(self._is_source(value) for value in tree_leaves((args, kwargs))):
            return result
        if func is _COPY and not self._is_source(args[0]):
            to, source = args[0], args[1]
            self._is_replayable &= to.shape == source.shape and _storage(to) in self._targets
            self._to.append(to)
            self._from.append(source)
        elif not all(self._is_source(value) for value in tree_leaves(result)):
            self._is_replayable = False
        return result

    def _is_source(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and _storage(value) == self._source


def replay(copies: Copies) -> None:
    """Copy again, in few kernels."""
    with torch.no_grad():
        torch._foreach_copy_(*copies)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
