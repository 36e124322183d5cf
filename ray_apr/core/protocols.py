"""What the parts of ray_apr expect of each other, as structural types.

No part imports another one's class to call it: the rollout worker talks to a `RolloutClient`, which
is the Serve client in a run and a scripted engine in unit tests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol

from ray_apr.core.messages import (
    GenerateRequest,
    Generation,
    ServerStatus,
    WeightGroup,
    WeightGroupState,
    WeightScores,
)

PauseMode = Literal["abort", "keep", "wait"]


class RolloutClient(Protocol):
    """All rollout servers, as their users see them. Every method has a time limit inside."""

    on_late: Callable[[Generation], None]
    """Gets what came of a request after `generate` had failed or was cancelled, as a connection
    breaks while the engine lives; set by who counts the tokens."""

    async def generate(self, request: GenerateRequest) -> Generation:
        """Continue a prompt; requests of one session share a replica.

        Ends with ``FinishReason.ABORT`` and the tokens so far when the request is aborted.
        """
        ...

    async def abort(self, request_ids: Sequence[str] | None = None) -> int:
        """Abort these requests (None: all of them) on all replicas; returns how many ran."""
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Freeze all engines; "abort" ends what runs, "keep" freezes it in place, "wait" lets it
        end first."""
        ...

    async def sleep(self, mode: PauseMode) -> None:
        """Pause all engines and free their devices' memory until the next weights arrive."""
        ...

    async def resume(self) -> None:
        """Unfreeze all engines; harmless where none is paused."""
        ...

    async def status(self, *, drain: bool = True) -> list[ServerStatus]:
        """One status for each replica; its spans since the last time with `drain` alone."""
        ...

    def set_limits(self, limits: Mapping[str, int]) -> None:
        """Give each replica at most this many requests from now on."""
        ...

    async def scale(self, num_engines: int) -> list[ServerStatus]:
        """Have so many engines from now on, in the order of their names.

        Those that come have to run; they get requests once they have the newest weights. Those that
        leave get none any more, and have none afterwards: what runs is aborted there.

        Returns:
            The last status of each engine that has left, but for those that did not answer or give
            all of their requests back.

        Raises:
            RolloutError: If no engine would be left to take requests; nothing has changed then.
        """
        ...

    async def weight_group_state(self) -> WeightGroupState:
        """Which replicas run, and whether just these have joined the group."""
        ...

    async def join_weight_group(self, group: WeightGroup, first_ranks: Mapping[str, int]) -> None:
        """Make these replicas' workers join the group that weights arrive by."""
        ...

    async def receive_weights(
        self, policy_version: int, notice: bytes = b"", *, resume: bool = False
    ) -> None:
        """Receive all weights in the group, as `notice` tells the workers (`weights.inbox`); from
        then on its members' tokens carry `policy_version`.

        With `resume` each engine goes on as soon as it has them, others than members at once; if
        this raises, some may have to be resumed yet.
        """
        ...

    async def expect_scores(self, policy_version: int, sequences: Sequence[Sequence[int]]) -> None:
        """Have each replica score sequences, once, when it has the weights of this version and goes
        on; before anything else that it serves under them."""
        ...

    async def weight_scores(self) -> list[WeightScores]:
        """What replicas have scored since `expect_scores`; those that got no weights have not."""
        ...

    async def probe_weights(
        self, replica_id: str, token_ids: Sequence[int]
    ) -> Mapping[str, list[list[float]]]:
        """What each module of a replica's model computes (`weights.probes`), by its name in the
        checkpoint; nothing where that cannot be told."""
        ...
