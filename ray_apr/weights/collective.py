"""Collective groups that live beside torch.distributed's default group.

Ray's own GLOO backend needs that default group, which belongs to FSDP in a train worker and to vLLM
in an engine worker; ``APR_GLOO`` (`transports.gloo`) has its own. ``APR_NCCL`` (`transports.nccl`)
is Ray's NCCL group of members that were told NCCL's id of it.

Members inside a Ray actor use plain `ray.util.collective` calls after `register`. vLLM's CPU worker
is no Ray actor, which those calls demand; `join` gives it the group object itself.
"""

from __future__ import annotations

import concurrent.futures
import logging
import time
from collections.abc import Callable
from typing import Any, Protocol

from ray.util.collective import types

from ray_apr.compat.ray import (
    BaseGroup,
    collective_backend,
    is_backend_available,
    register_collective_backend,
)
from ray_apr.core.exceptions import SYNC_BROKEN, SyncBrokenError, WeightSyncError
from ray_apr.core.threads import in_thread

logger = logging.getLogger(__name__)

_MEETING_POLL_S = 0.05


class CollectiveGroup(Protocol):
    """What members need to know of a group of the trainer (rank 0) and all engine workers."""

    @property
    def backend(self) -> str:
        """Name in ray.util.collective's registry."""
        ...

    @property
    def world_size(self) -> int:
        """1 + replicas x tensor-parallel size."""
        ...

    @property
    def timeout_s(self) -> float:
        """Limit of one collective call: a dead or silent peer raises after it."""
        ...

    @property
    def place(self) -> str:
        """Where the members meet, for messages."""
        ...

    @property
    def address(self) -> str:
        """Name of the group in ray.util.collective, which carries what its members need to meet."""
        ...

    def register(self) -> None:
        """Make the backend known in this process, if it can be had; harmless when repeated."""
        ...

    def meet(
        self, joined: Any, *, timeout_s: float, is_hopeless: Callable[[], bool] = lambda: False
    ) -> None:
        """Wait for the members, if making the group object has not; see `wait_for_members`."""
        ...


def register(name: str, group_cls: type[BaseGroup]) -> None:
    """Make a backend known to ray.util.collective in this process; harmless when repeated."""
    try:
        register_collective_backend(name, group_cls)
    except ValueError:
        logger.debug("collective backend %s is registered already", name)


def from_rank_0() -> types.BroadcastOptions:
    """Options of a broadcast of the sender's only tensor."""
    options = types.BroadcastOptions()
    options.root_rank, options.root_tensor = 0, 0
    return options


def join(group: CollectiveGroup, rank: int) -> BaseGroup:
    """Join outside of `ray.util.collective`; waits for all members.

    With NCCL it waits half as long as rank 0: who is free again meanwhile can join the group that
    rank 0 then forms without the one that has not come.

    Raises:
        SyncBrokenError: If the members do not meet in time.
        WeightSyncError: If the backend is missing.
    """
    group.register()
    if not is_backend_available(group.backend):
        raise WeightSyncError(f"collective backend {group.backend} is not available here")
    joined: BaseGroup | None = None
    try:
        joined = collective_backend(group.backend)(group.world_size, rank, group.address)
        group.meet(joined, timeout_s=group.timeout_s / 2)
        return joined
    except (RuntimeError, ValueError, OSError) as error:
        if joined is not None:
            joined.destroy_group()
        raise SyncBrokenError(
            f"{SYNC_BROKEN}: rank {rank} of {group.world_size} could not join the weight group of "
            f"{group.place}: {error}"
        ) from error


def wait_for_members(
    form: Callable[[], None], *, timeout_s: float, is_hopeless: Callable[[], bool]
) -> None:
    """Run what waits for all members, in a thread of its own.

    Waits for: the members. Unblocked by: them, `is_hopeless`, or `timeout_s`.

    Args:
        form: Returns once they are there.
        timeout_s: Limit.
        is_hopeless: Says that a member will not come.

    Raises:
        RuntimeError: If it did not return in time, or is hopeless. It goes on by itself.
        Exception: What `form` raised.
    """
    deadline = time.monotonic() + timeout_s
    formed = in_thread(form, "form-weight-group")
    while not formed.done():
        if time.monotonic() > deadline:
            raise RuntimeError(f"a member did not come within {timeout_s:g} s")
        if is_hopeless():
            raise RuntimeError("a member will not come")
        concurrent.futures.wait([formed], timeout=_MEETING_POLL_S)
    formed.result(timeout=0)
