"""Where a train worker's weights and optimizer states are between two steps.

`AlwaysThere` has a device of its own, or one that holds an engine beside it. `Alternating` has one
in turns with the engines:

    enter ─► train step, checkpoint ─► gather ─► leave ─► the engines read, and go on
      └ the engines sleep                          └ all but what was gathered goes to the host

What FSDP itself keeps on the host (``train.cpu_offload``) is there always, in either.

Invariants, kept by both:
    * Between `enter` and `leave` the model is on the device, on all ranks; a train worker begins
      there.
    * `leave` comes after the gather of each sync, and before its weights go.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch.distributed as dist

from ray_apr.train.span import Span

if TYPE_CHECKING:
    from ray_apr.train.control import RunControl
    from ray_apr.train.offload import Offload


class Residency(Protocol):
    """Which of the two a run has."""

    takes_turns: bool
    """Whether engines have the device between two steps: they begin asleep, without weights, and
    after a sync there is nothing here to save."""

    def enter(self) -> None:
        """Have the model on the device, on all ranks; waits for who has the device."""
        ...

    def leave(self) -> None:
        """Leave the device to others, on all ranks."""
        ...


class AlwaysThere:
    """The model stays where it is."""

    takes_turns = False

    def enter(self) -> None:
        """It is there."""

    def leave(self) -> None:
        """It stays."""


class Alternating:
    """The device is the engines' from the gather of a sync until the next step.

    Args:
        offload: Moves what this rank keeps.
        control: Rank 0's line to the engines; None on other ranks.
        ranks: All train workers, which wait for rank 0 without their devices.
    """

    takes_turns = True

    def __init__(
        self, offload: Offload, control: RunControl | None, ranks: dist.ProcessGroup
    ) -> None:
        self._offload = offload
        self._control = control
        self._ranks = ranks

    def enter(self) -> None:
        """Have the engines sleep, and take the device."""
        with Span() as switched:
            if self._control is not None:
                self._control.sleep_engines()
            dist.barrier(self._ranks)
            self._offload.to_device()
        if self._control is not None:
            self._control.record_span("switch", switched.start_s, switched.end_s)

    def leave(self) -> None:
        """Go to the host; the engines may wake once all ranks have."""
        self._offload.to_host()
        dist.barrier(self._ranks)
