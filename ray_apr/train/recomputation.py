"""How many decoder layers compute their activations again: in each micro-batch, as few as its size
lets them (``train.activation_checkpointing: auto``).

What a layer keeps for its backward pass, and what a pass needs beside that, are measured once, in a
pass of made-up samples after the compilation, on each rank by itself: a rank's choice changes no
collective. What else is there is seen before each pass: optimizer states, gradients of the
micro-batches before it, weights on their way to the engines, and the holes between all of these,
in which a pass may find no room. Layers are chosen by the unit that
FSDP gathers, the first ones of the model first, as they are computed again when the later ones
have freed theirs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from ray_apr.train.tensors import local_tensor

if TYPE_CHECKING:
    from collections.abc import Iterator

logger = logging.getLogger(__name__)

_ATTRIBUTE = "recomputation"
_RESERVE = 0.06
"""Share of the device's memory for what comes later: collectives, the buckets of a weight sync,
holes that a pass makes."""
_GB = 1e9


class Memory(Protocol):
    """Of one device, in bytes."""

    def free(self) -> int:
        """What this process could allocate now."""
        ...

    def total(self) -> int:
        """What the device has."""
        ...

    def allocated(self) -> int:
        """What tensors of this process have."""
        ...

    def holes(self) -> int:
        """The most that may lie between them in pieces which are too small for a pass."""
        ...

    def peak(self, run: Callable[[], object]) -> int:
        """The most that they have while something runs."""
        ...


class CudaMemory:
    """Of a CUDA device, as PyTorch's allocator sees it.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def free(self) -> int:
        """What the driver has left, and the allocator without a tensor in it."""
        left, _ = torch.cuda.mem_get_info(self._device)
        return left + torch.cuda.memory_reserved(self._device) - self.allocated()

    def total(self) -> int:
        """What the device has."""
        return torch.cuda.get_device_properties(self._device).total_memory

    def allocated(self) -> int:
        """What tensors of this process have."""
        return torch.cuda.memory_allocated(self._device)

    def holes(self) -> int:
        """Free parts of what the allocator has cut up, which it cannot give back to the driver."""
        return int(torch.cuda.memory_stats(self._device)["inactive_split_bytes.all.current"])

    def peak(self, run: Callable[[], object]) -> int:
        """The most that they have while something runs."""
        torch.cuda.reset_peak_memory_stats(self._device)
        run()
        return torch.cuda.max_memory_allocated(self._device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Memory of a micro-batch, as measured with one of `num_tokens`; all in bytes."""

    num_tokens: int
    num_layers: int
    num_keeping: int
    """Layers that kept their activations when it was measured."""
    peak: int
    """Of that micro-batch, beyond what was there before it."""
    of_layer: int
    """What a layer that keeps its activations keeps beyond one that does not, for all tokens."""

    def of(self, num_tokens: int, num_keeping: int) -> float:
        """An upper estimate for a micro-batch of so many tokens in which so many layers keep
        theirs: what is beside the layers is not taken to be less in a smaller one."""
        share = num_tokens / self.num_tokens
        added = num_keeping * share - self.num_keeping * min(1.0, share)
        return self.peak * max(1.0, share) + self.of_layer * max(0.0, added)


def attach_recomputation(
    model: nn.Module, units: Sequence[Sequence[nn.Module]], memory: Memory
) -> None:
    """Have a model choose by itself; see `Recomputation`."""
    setattr(model, _ATTRIBUTE, Recomputation(model, units, memory))


def recomputation_of(model: nn.Module) -> Recomputation | None:
    """What was attached to a model, if anything was."""
    return getattr(model, _ATTRIBUTE, None)


class Recomputation:
    """Chooses before each forward pass; until something was measured, all units but the last one
    compute theirs again.

    Args:
        model: Its layers have what Transformers calls gradient checkpointing.
        units: Its decoder layers, in groups that are chosen together.
        memory: Of the device.
    """

    def __init__(self, model: Any, units: Sequence[Sequence[nn.Module]], memory: Memory) -> None:
        self._model = model
        self._units = units
        self._memory = memory
        self._need: Need | None = None
        self._limit = 0
        """Bytes that tensors may have on the device."""
        model.base_model.register_forward_pre_hook(self._before_forward, with_kwargs=True)

    def measure(self, run: Callable[[], object], num_tokens: int) -> None:
        """Run a pass, and choose from then on by what it took.

        Args:
            run: A forward and a backward pass of one micro-batch, compiled before; its gradients
                stay until it has returned.
            num_tokens: Its size.
        """
        self._need = None
        last = self._units[-1]
        before = self._memory.allocated()
        reserve = int(_RESERVE * self._memory.total())
        self._limit = before + self._memory.free() - reserve
        with self._measured(last) as kept:
            peak = self._memory.peak(run) - before
        self._need = Need(
            num_tokens=num_tokens,
            num_layers=sum(map(len, self._units)),
            num_keeping=len(last),
            peak=peak,
            of_layer=max(1, sum(kept) // len(last)),
        )
        states = sum(
            2 * local_tensor(p).nbytes
            for p in self._model.parameters()
            if p.requires_grad and p.device.type != "cpu"
        )
        self._tell(num_tokens, self._limit - before - states - self._memory.holes())

    def num_keeping(self, num_tokens: int, free: int) -> int:
        """Layers that keep their activations in a micro-batch of so many tokens, with so many free
        bytes."""
        if self._need is None:
            return len(self._units[-1])
        total = 0
        for unit in reversed(self._units):
            if self._need.of(num_tokens, total + len(unit)) > free:
                break
            total += len(unit)
        return total

    def _before_forward(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.is_grad_enabled():
            return
        input_ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        free = self._limit - self._memory.allocated() - self._memory.holes()
        left = self.num_keeping(input_ids.numel(), free)
        for unit in reversed(self._units):
            for layer in unit:
                layer.gradient_checkpointing = left <= 0  # type: ignore[assignment]
            left -= len(unit)

    @contextmanager
    def _measured(self, layers: Sequence[nn.Module]) -> Iterator[list[int]]:
        """What layers keep of a forward pass, in bytes, without their input."""
        kept: list[int] = []

        def measured(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            before = self._memory.allocated()
            output = forward(*args, **kwargs)
            hidden = output[0] if isinstance(output, tuple) else output
            kept.append(self._memory.allocated() - before - hidden.nbytes)
            return output

        forwards = [layer.forward for layer in layers]
        own = ["forward" in vars(layer) for layer in layers]
        for layer, forward in zip(layers, forwards, strict=True):
            layer.forward = partial(measured, forward)  # type: ignore[method-assign]
        try:
            yield kept
        finally:
            for layer, forward, is_own in zip(layers, forwards, own, strict=True):
                if is_own:
                    layer.forward = forward  # type: ignore[method-assign]
                else:
                    del layer.forward

    def _tell(self, num_tokens: int, free: int) -> None:
        """Say what is chosen once the optimizer has its states."""
        logger.info(self.about(num_tokens, free))
        assert self._need is not None
        needed = self._need.of(num_tokens, self.num_keeping(num_tokens, free))
        if needed > free:
            logger.warning(
                "a micro-batch of %d tokens needs about %.1f GB of this device, where %.1f GB are "
                "left for it; should memory run out, lower train.micro_batch_tokens, or set "
                "train.master_dtype to bfloat16, train.cpu_offload or train.lora",
                num_tokens,
                needed / _GB,
                max(0, free) / _GB,
            )

    def about(self, num_tokens: int, free: int) -> str:
        """What was measured and is chosen for a micro-batch of so many tokens with so many free
        bytes, as a sentence."""
        if self._need is None:
            return "nothing is measured yet"
        num_layers, keeping = self._need.num_layers, self.num_keeping(num_tokens, free)
        return (
            f"{num_layers - keeping} of {num_layers} layers compute their activations again in a "
            f"micro-batch of {num_tokens} tokens, which needs about "
            f"{self._need.of(num_tokens, keeping) / _GB:.1f} of {free / _GB:.1f} GB; a layer "
            f"keeps {self._need.of_layer / _GB:.2f} GB of {self._need.num_tokens} tokens"
        )
