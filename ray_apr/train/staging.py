"""Copies of the trainer's state in the host's memory, made beside the steps that follow.

    checkpoint ─► ask for a copy ─► forward, backward ─► optimizer's step
                    └ a thread ─────────────────────────► which waits for it

Invariants, kept by `Stager`:
    * A copy is of the moment at which it was asked for: what the device had to do by then is done
      first, and the optimizer changes nothing before the copy is there.
    * The host's memory is taken and pinned once, and belongs to one copy at a time. Other processes
      may read it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

from ray_apr.core.exceptions import StarvedError, TrainError, one_line
from ray_apr.core.threads import in_thread
from ray_apr.train.host_memory import HostMemory
from ray_apr.train.tensors import compute_device, local_tensor
from ray_apr.weights.plan import aligned

logger = logging.getLogger(__name__)

COPY_LIMIT_S = 600.0
"""Longest that a copy may take."""
_AT_A_TIME_BYTES = 1 << 27
"""What the device copies at a time, so that small copies of a step get in between."""


def trainer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """State of a model, sharded or not, and of its optimizer, by the names of parameters.

    Its tensors are the trainer's own. The learning rate in it means nothing: it follows from the
    step.
    """
    is_new = not optimizer.state
    of_model, of_optimizer = get_state_dict(model, optimizer)
    if is_new:  # torch has made its state by a step without gradients, and has counted that
        for of_parameter in optimizer.state.values():
            of_parameter["step"].zero_()
    return {"model": of_model, "optimizer": of_optimizer}


class Stager:
    """Copies the state of a model and its optimizer to memory of the host that it keeps.

    Args:
        model: The sharded model.
        optimizer: Its optimizer, which alone changes the state; each of its steps waits for the
            copy that is being made.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model = model
        self._optimizer = optimizer
        device = compute_device(model)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._state: dict[str, Any] = {}
        self._tensors: list[int] = []
        """Which tensors `_state` was put together of."""
        self._copy: Future[dict[str, Any]] | None = None
        self.memory = HostMemory(0)
        """What the last copy is in."""
        self._is_pinned = False
        self._twins: list[torch.Tensor] = []
        """A tensor of the host's memory for each of the state."""
        self._hook = optimizer.register_step_pre_hook(self._hold)

    def stage(self) -> None:
        """Begin a copy of `trainer_state`, which `wait` returns; it may be read until the next one.

        Waits for: the copy before, if a step of the optimizer has not. Unblocked by: as `wait`.
        """
        self.wait()
        tensors = self._own_tensors()
        if tensors != self._tensors:  # else what steps change is in it
            self._state = trainer_state(self._model, self._optimizer)
            self._tensors = self._own_tensors()
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        self._copy = in_thread(self._copied, "copy of the state")

    def wait(self) -> dict[str, Any]:
        """Wait until the last copy is there; returns it, or nothing where none was asked for.

        Waits for: its thread. Unblocked by: that, or `COPY_LIMIT_S`.

        Raises:
            TrainError: If it cannot be made.
            StarvedError: If it takes longer than that.
        """
        if self._copy is None:
            return {}
        try:
            return self._copy.result(COPY_LIMIT_S)
        except TimeoutError as error:
            raise StarvedError(
                "weights and optimizer states were not copied to the host's memory within "
                f"{COPY_LIMIT_S:g} s; see whether the host moves memory to its disk"
            ) from error
        except Exception as error:
            raise TrainError(
                "weights and optimizer states could not be copied to the host's memory for a "
                f"checkpoint: {type(error).__name__}: {one_line(error)}; a host needs room there "
                "for those of its train workers: have more hosts, or set train.master_dtype to "
                "bfloat16 or train.lora"
            ) from error

    def close(self) -> None:
        """Give the memory back; no copy is read any more.

        Waits for: the last copy. Unblocked by: as `wait`.
        """
        self._hook.remove()
        self.wait()
        self._copy, self._state, self._twins = None, {}, []
        self._take_memory(0)
        self.memory.close()

    def _hold(self, *_: Any) -> None:
        """Have a step of the optimizer wait for the copy.

        Waits for: that. Unblocked by: as `wait`.
        """
        self.wait()

    def _own_tensors(self) -> list[int]:
        of_model = [local_tensor(p).data_ptr() for p in self._model.parameters()]
        return of_model + [
            id(value) for state in self._optimizer.state.values() for value in state.values()
        ]

    @torch.no_grad()
    def _copied(self) -> dict[str, Any]:
        """Make a copy, in a thread of its own."""
        if self._stream is not None:  # a thread begins at the first GPU, and would take room there
            torch.cuda.set_device(self._stream.device)
        found: dict[Any, torch.Tensor] = {}
        _mapped(self._state, lambda tensor: found.setdefault(_memory_of(tensor), tensor))
        if [*map(_form, found.values())] != [*map(_form, self._twins)]:
            self._make_twins(list(found.values()))
        pairs = zip(map(local_tensor, self._twins), map(local_tensor, found.values()), strict=True)
        with torch.cuda.stream(self._stream):  # on a CPU there is none, and nothing to enter
            for to, of in _parts(pairs):
                torch._foreach_copy_(to, of, non_blocking=True)
                if self._stream is not None:
                    self._stream.synchronize()
        copies = dict(zip(found, self._twins, strict=True))
        copied: dict[str, Any] = _mapped(self._state, lambda tensor: copies[_memory_of(tensor)])
        return copied

    def _make_twins(self, tensors: list[torch.Tensor]) -> None:
        """Make tensors like these in memory of the host, each with a storage of its own."""
        rooms = [aligned(local_tensor(tensor).nbytes) for tensor in tensors]
        self._twins = []
        self._take_memory(sum(rooms))
        begin = 0
        for tensor, room in zip(tensors, rooms, strict=True):
            twin = torch.empty_like(tensor, device="cpu")
            if room:  # else there is nothing to copy
                local = local_tensor(twin)
                local.set_(self.memory.tensor(begin, local.shape, local.dtype))
            self._twins.append(twin)
            begin += room

    def _take_memory(self, size: int) -> None:
        """Have so many bytes, pinned where they are a GPU's; gives back those before."""
        if self._is_pinned:
            torch.cuda.cudart().cudaHostUnregister(self.memory.address)
        self._is_pinned = False
        self.memory.close()
        self.memory = HostMemory(size)
        if self._stream is None or not size:
            return
        torch.from_numpy(self.memory.bytes).zero_()  # to be pinned more quickly: by all threads
        code = int(torch.cuda.cudart().cudaHostRegister(self.memory.address, size, 0))
        self._is_pinned = code == 0
        if code:
            logger.warning(
                "%d bytes of the host cannot be pinned (CUDA's error %d): steps after a checkpoint "
                "take longer",
                size,
                code,
            )


def _mapped(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """The same with what `change` gives for each tensor."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: _mapped(inner, change) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_mapped(inner, change) for inner in value)
    return value


def _memory_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    return local_tensor(tensor).data_ptr(), *_form(tensor)


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, local_tensor(tensor).shape, tensor.dtype


def _parts(
    pairs: Iterator[tuple[torch.Tensor, torch.Tensor]],
) -> Iterator[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """Pairs of tensors in lists of at most `_AT_A_TIME_BYTES`, or of one pair."""
    part: list[tuple[torch.Tensor, torch.Tensor]] = []
    size = 0
    for pair in pairs:
        if part and size + pair[0].nbytes > _AT_A_TIME_BYTES:
            yield [to for to, _ in part], [of for _, of in part]
            part, size = [], 0
        part.append(pair)
        size += pair[0].nbytes
    if part:
        yield [to for to, _ in part], [of for _, of in part]
