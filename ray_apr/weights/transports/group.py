"""What the transports have in common whose members form a collective group: `gloo` and `nccl`.

Invariants, kept by `GroupSender`:
    * A group that breaks off is left, so that no peer waits for the rest.
    * What was gathered stays until `release`: the sync may need another group.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ray_apr.core.exceptions import SyncBrokenError
from ray_apr.weights.collective import wait_for_members
from ray_apr.weights.plan import Bucket, ParamSpec, plan_buckets
from ray_apr.weights.transports.base import WeightSender

_CLOSE_S = 5.0
"""What members take, beyond the limit of the group, to give it up by themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupEndpoint:
    """One collective group of the trainer (rank 0) and all engine workers, and what it carries."""

    backend: ClassVar[str]

    host: str
    """Of rank 0."""
    world_size: int
    """1 + replicas x tensor-parallel size."""
    group_name: str
    timeout_s: float
    """Limit of one collective call: a dead or silent peer raises after it."""
    bucket_bytes: int
    params: tuple[ParamSpec, ...]

    def buckets(self) -> tuple[Bucket, ...]:
        """The plan, the same on all members."""
        return plan_buckets(self.params, self.bucket_bytes)

    @property
    def place(self) -> str:
        """Where the members meet, for messages."""
        return self.host

    @property
    def address(self) -> str:
        """Name in ray.util.collective, which carries what the members need to meet."""
        raise NotImplementedError

    def register(self) -> None:
        """Make the backend known in this process."""
        raise NotImplementedError

    def meet(
        self, joined: Any, *, timeout_s: float, is_hopeless: Callable[[], bool] = lambda: False
    ) -> None:
        """Wait for the members; nothing if making the group object has done so."""

    def give_up(self) -> None:
        """End the wait of members that still come, where rank 0 can."""


class GroupSender(WeightSender):
    """Broadcasts what was gathered on rank 0; see `WeightSender`."""

    _endpoint: GroupEndpoint | None = None

    def common(self, num_engine_workers: int, host: str, timeout_s: float) -> dict[str, Any]:
        """Fields of a new endpoint that do not depend on the backend."""
        return {
            "host": host,
            "world_size": 1 + num_engine_workers,
            "group_name": f"apr-weights-{uuid.uuid4().hex[:8]}",
            "timeout_s": timeout_s,
            "bucket_bytes": self.weights.bucket_bytes,
            "params": self.weights.params,
        }

    def connect(
        self, endpoint: GroupEndpoint, is_hopeless: Callable[[], bool] = lambda: False
    ) -> None:
        """Join as rank 0; waits for all engine workers. See `WeightSender.connect`."""
        from ray.util import collective

        self._leave()  # a group that broke
        endpoint.register()
        name = endpoint.address

        def join() -> None:
            collective.init_collective_group(
                endpoint.world_size, 0, backend=endpoint.backend, group_name=name
            )

        try:
            limit_s = endpoint.timeout_s + _CLOSE_S
            wait_for_members(join, timeout_s=limit_s, is_hopeless=is_hopeless)
            with self._on_device():
                joined = collective.get_group_handle(name)
                endpoint.meet(joined, timeout_s=endpoint.timeout_s, is_hopeless=is_hopeless)
        except (RuntimeError, ValueError, OSError) as error:
            endpoint.give_up()  # first: a group that still forms has ray's lock
            if collective.is_group_initialized(name):
                collective.destroy_collective_group(name)
            raise SyncBrokenError(
                f"the {endpoint.world_size - 1} engine workers did not join the weight group "
                f"(limit {endpoint.timeout_s:g} s): {error}"
            ) from error
        self._endpoint = endpoint

    def deliver(self) -> None:
        """Broadcast; returns when all of it has left. See `WeightSender.deliver`."""
        from ray.util import collective

        self.check_gathered()
        if self._endpoint is None:
            raise SyncBrokenError("connect() comes before deliver()")
        name, deadline = self._endpoint.address, time.monotonic() + self._endpoint.timeout_s
        try:
            with self._on_device():
                for buffer in self.weights.staged:
                    collective.broadcast(buffer, src_rank=0, group_name=name)
                collective.get_group_handle(name).wait(deadline)
        except RuntimeError as error:
            self._leave()
            raise SyncBrokenError(f"the weight broadcast broke off: {error}") from error

    def close(self) -> None:
        """Leave the group."""
        super().close()
        self._leave()

    def _leave(self) -> None:
        from ray.util import collective

        if self._endpoint is not None:
            collective.destroy_collective_group(self._endpoint.address)
            self._endpoint = None

    def _on_device(self) -> AbstractContextManager[object]:
        """The model's device as the current one: a thread begins on the first GPU."""
        device = self.weights.device
        return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
