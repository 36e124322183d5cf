"""The client of all rollout servers: a `RolloutClient` over one Serve deployment.

Invariants, kept by `ServeRolloutClient`:
    * Requests of one session share a replica as long as one of them runs (prefix-cache hits); a
      session that begins goes to the replica with the fewest requests.
    * A control verb reaches every replica that lives, or raises what the first of the others said.
      A replica whose engine is dead is dead, though its process lives until Serve replaces it.
    * Every control call has a time limit. A generate call ends with its engine's progress: the
      server sees to that, and Serve to servers that do not answer.
    * A request whose caller has gone is aborted where it runs.

Serve routes a session id by consistent hashing, which neither balances nor tells where it goes. The
client therefore routes by a few ids of its own, "slots", whose replicas it learns from their
replies; a slot stands for a replica as long as the set of replicas does not change.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ray import serve
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError
from ray.serve.exceptions import RayServeException

from ray_apr.config import RolloutConfig
from ray_apr.core.messages import GenerateRequest, WeightGroup
from ray_apr.exceptions import (
    EngineDiedError,
    EngineUnavailableError,
    RolloutError,
    SyncBrokenError,
)
from ray_apr.placement import Placement
from ray_apr.protocols import PauseMode
from ray_apr.serve.errors import none_runs, ours, translated
from ray_apr.serve.exchange import Exchange
from ray_apr.serve.names import DEPLOYMENT
from ray_apr.serve.scores import SCORE_LIMIT_S
from ray_apr.types import (
    Generation,
    ServerStatus,
    WeightGroupState,
    WeightScores,
)

logger = logging.getLogger(__name__)

_CONTROL_TIMEOUT_S = 60.0
_NUM_SLOTS_TRIED = 64


class ServeRolloutClient:
    """All replicas of one application.

    Args:
        app_name: Name of the Serve application.
        config: Number of replicas and time limits.
        max_inflight: Most requests of one replica, until `set_limits` says otherwise.
        weight_sync_timeout_s: Limit for the replicas to receive weights.
    """

    def __init__(
        self,
        app_name: str,
        config: RolloutConfig,
        *,
        max_inflight: int = 1024,
        weight_sync_timeout_s: float = 120.0,
    ) -> None:
        self._handle: Any = serve.get_deployment_handle(DEPLOYMENT, app_name)
        self._config = config
        self._weight_sync_timeout_s = weight_sync_timeout_s
        self._slots: dict[str, Any] = {}
        """A handle for each replica that gets requests, by replica id."""
        self._handles: dict[str, Any] = {}
        """The same, with those of replicas that have other weights."""
        self._exchange = Exchange(self._find)
        self._learning = asyncio.Lock()
        self._placement = Placement((), limit=max_inflight)
        self._max_inflight = max_inflight
        self._members: frozenset[str] = frozenset()
        """Replicas that have joined the weight group."""
        self._policy_version = 0
        """Newest version that is known to be with the servers."""
        self._placed: dict[str, str] = {}
        """Replica of each request under way."""

    # -- generation ------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> Generation:
        """Continue a prompt; see `RolloutClient`.

        Raises:
            RolloutError: If the request is refused, or has the id of another one that is under way.
            EngineUnavailableError: If no engine takes it, or its engine ended; no fault of it.
        """
        if not self._slots:
            try:
                await self._learn()
            except RolloutError as error:  # also where a server does not answer in time
                raise EngineUnavailableError(str(error)) from error
        request_id = request.request_id
        if request_id in self._placed:
            raise RolloutError(f"request {request_id} is under way already")
        placement, slots = self._placement, self._slots
        replica_id = self._placed[request_id] = placement.enter(
            request.sample_id, request.session_id
        )
        request = dataclasses.replace(request, min_policy_version=self._policy_version)
        try:
            generation = await self._outcome(replica_id, slots[replica_id], request)
        except EngineUnavailableError:
            self._slots = {}  # learned again by the next call: a replica may be gone
            raise
        finally:
            del self._placed[request_id]
            placement.leave(replica_id)
        newest = max((segment.policy_version for segment in generation.segments), default=0)
        self._policy_version = max(self._policy_version, newest)
        if generation.replica_id != replica_id:
            self._slots = {}  # the replicas have changed, and the slots with them
        return generation

    async def _outcome(self, replica_id: str, slot: Any, request: GenerateRequest) -> Generation:
        """Send a request, and wait for its end.

        Waits for: the outcome. Unblocked by: the replica, which ends what does not go on; its
        death; the limit of `Exchange` for one that says nothing.
        """
        future = self._exchange.post(replica_id, request)
        try:
            return await future
        finally:
            request_id = request.request_id
            if future.cancelled() and not self._exchange.withdraw(replica_id, request_id):
                with contextlib.suppress(RayError, RayServeException):
                    slot.abort.remote([request_id])

    async def _find(self, replica_id: str, is_elsewhere: bool) -> Any:
        """A handle that leads to a replica; see `Exchange`."""
        if is_elsewhere or replica_id not in self._handles:
            self._slots = {}  # the replicas have changed, and the slots with them
            await self._learn()
        if replica_id not in self._handles:
            raise EngineUnavailableError(f"{replica_id} is gone")
        return self._handles[replica_id]

    def set_limits(self, limits: Mapping[str, int]) -> None:
        """Give each replica at most this many requests from now on; unknown ones are left out."""
        for replica_id, limit in limits.items():
            if replica_id in self._slots:
                self._placement.set_limit(replica_id, limit)

    async def _learn(self) -> None:
        """Find a slot for each replica."""
        async with self._learning:
            if self._slots:
                return
            running = await self.status(drain=False)
            # one that Serve has started again has the base model until the next sync, and one that
            # is paused may be in the midst of it
            newest = self._policy_version
            living = [status for status in running if not status.is_stalled]
            ready = {s.replica_id for s in living if s.is_paused or s.policy_version >= newest}
            if not ready:
                lacks = f"has the weights of version {newest}" if living else "makes any token"
                raise EngineUnavailableError(f"no rollout server {lacks}")
            replicas = {status.replica_id for status in running}
            found: dict[str, Any] = {}
            for number in range(_NUM_SLOTS_TRIED * len(replicas)):
                if replicas <= set(found):
                    break
                handle = self._handle.options(session_id=f"slot-{number}")
                async with ours("replica_id", _CONTROL_TIMEOUT_S):
                    found.setdefault(await handle.replica_id.remote(), handle)
            if missing := replicas - set(found):
                logger.warning("no session leads to replicas %s; they stay idle", sorted(missing))
            slots = {r: handle for r, handle in found.items() if r in ready}
            if not slots:
                raise EngineUnavailableError("no rollout server with the newest weights answers")
            self._handles, self._slots = found, slots
            self._placement = Placement(self._slots, limit=self._max_inflight)

    # -- control ---------------------------------------------------------------------------------

    async def abort(self, request_ids: Sequence[str] | None = None) -> int:
        """Abort these requests where they run (None: all, on all replicas)."""
        if request_ids is None:
            return await self.abort_anywhere(None)
        by_replica: dict[str, list[str]] = {}
        num_unsent = 0
        for request_id in request_ids:
            replica_id = self._placed.get(request_id)
            if replica_id is not None and self._exchange.withdraw(replica_id, request_id):
                num_unsent += 1
            elif replica_id is not None:
                by_replica.setdefault(replica_id, []).append(request_id)
        if not set(by_replica) <= set(self._slots):
            return await self.abort_anywhere(request_ids)
        async with ours("abort", _CONTROL_TIMEOUT_S):
            calls = [self._slots[r].abort.remote(i) for r, i in by_replica.items()]
            results = await asyncio.gather(*calls, return_exceptions=True)
        # what a dead one has ends by itself
        return num_unsent + sum(_of_living([0, *results], "abort"))

    async def abort_anywhere(self, request_ids: Sequence[str] | None) -> int:
        """Abort requests that may have come in through another client."""
        return sum(await self._all("abort", None if request_ids is None else list(request_ids)))

    async def pause(self, mode: PauseMode) -> None:
        """Freeze all engines; with "wait" once what runs has ended."""
        await self._stop("pause", mode)

    async def sleep(self, mode: PauseMode) -> None:
        """Have all engines leave their devices to the train workers."""
        await self._stop("sleep", mode)

    async def _stop(self, verb: str, mode: PauseMode) -> None:
        # what a pause waits for ends with its engine's progress, however long it takes
        await self._all(verb, mode, timeout_s=None if mode == "wait" else _CONTROL_TIMEOUT_S)

    async def resume(self) -> None:
        """Unfreeze all engines; every replica is tried before an error is raised."""
        await self._all("resume", timeout_s=_CONTROL_TIMEOUT_S + SCORE_LIMIT_S)

    async def is_paused(self) -> bool:
        """Whether any engine is frozen."""
        return any(await self._all("is_paused"))

    async def status(self, *, drain: bool = True) -> list[ServerStatus]:
        """One status for each replica, in order of their ids.

        Args:
            drain: Whether the spans since the last status are taken along; only one reader may.
        """
        return sorted(await self._all("status", drain), key=lambda status: status.replica_id)

    async def weight_group_state(self) -> WeightGroupState:
        """Which replicas run; they get ranks in order of their ids, from 1 on."""
        size = self._config.tensor_parallel_size
        replicas = [status.replica_id for status in await self.status(drain=False)]
        return WeightGroupState(
            first_ranks={replica: 1 + i * size for i, replica in enumerate(replicas)},
            num_workers=len(replicas) * size,
            is_whole=self._members == set(replicas),
        )

    async def join_weight_group(self, group: WeightGroup, first_ranks: Mapping[str, int]) -> None:
        """Make these replicas join; the first one that cannot ends the wait for the others.

        Raises:
            SyncBrokenError: If they do not, within the group's limit and some time to say so.
        """
        self._members = frozenset()
        limit_s = group.timeout_s + _CONTROL_TIMEOUT_S
        try:
            async with ours("join_weight_group", None):
                response = self._handle.broadcast("join_weight_group", group, dict(first_ranks))
                took_part = await response.results_async(timeout_s=limit_s)
        except RolloutError as error:  # one is dead, or does not answer
            raise SyncBrokenError(str(error)) from error
        if sum(took_part) < len(first_ranks):
            raise SyncBrokenError(f"only {sum(took_part)} of {len(first_ranks)} servers live")
        self._members = frozenset(first_ranks)

    async def receive_weights(
        self, policy_version: int, notice: bytes = b"", *, resume: bool = False
    ) -> None:
        """Receive all weights on all replicas of the group.

        One that dies meanwhile does not count; the group is not whole then.

        Raises:
            SyncBrokenError: If one that lives did not receive them, or none did.
        """
        members = sorted(self._members)
        try:
            received = await self._all(
                "receive_weights", policy_version, members, notice, resume,
                timeout_s=self._weight_sync_timeout_s,
            )  # fmt: skip
        except RolloutError as error:  # none lives, or one does not answer
            raise SyncBrokenError(str(error)) from error
        if not any(received):
            raise SyncBrokenError(f"none of {members} lives to receive version {policy_version}")
        if sum(received) < len(members):
            logger.warning(
                "%d of %d servers live, and have version %d",
                sum(received), len(members), policy_version,
            )  # fmt: skip
        self._policy_version = policy_version
        if self._members != set(self._slots):
            self._slots = {}  # learned again by the next call: a new replica may answer now

    async def expect_scores(self, policy_version: int, sequences: Sequence[Sequence[int]]) -> None:
        """Have all replicas score sequences once they have the weights of a version."""
        await self._all("expect_scores", policy_version, sequences)

    async def weight_scores(self) -> list[WeightScores]:
        """What the replicas have scored since `expect_scores`, in order of their ids."""
        found = [scores for scores in await self._all("weight_scores") if scores is not None]
        return sorted(found, key=lambda scores: scores.replica_id)

    async def probe_weights(
        self, replica_id: str, token_ids: Sequence[int]
    ) -> Mapping[str, list[list[float]]]:
        """What each module of one replica's model computes (`weights.probes`)."""
        answers = await self._all("probe_weights", replica_id, token_ids)
        return next(filter(None, answers), {})

    async def _all(
        self, verb: str, *args: Any, timeout_s: float | None = _CONTROL_TIMEOUT_S
    ) -> list[Any]:
        """Call every replica; raise what the first one of them raised.

        A replica that has died is none any more, though Serve knows it for some seconds.
        """
        async with ours(verb, None):  # the answers have the limit
            response = self._handle.broadcast(verb, *args)
            results = await response.results_async(timeout_s=timeout_s, return_exceptions=True)
        return _of_living(results, verb)


def _is_death(result: object) -> bool:
    """Whether an answer says that the replica or its engine is dead."""
    cause = result.cause if isinstance(result, RayTaskError) else result
    if isinstance(cause, ActorUnavailableError):  # of a connection; it may be back in a moment
        return False
    return isinstance(cause, RayActorError | EngineDiedError)


def _of_living(results: Iterable[Any], verb: str) -> list[Any]:
    """Answers of the replicas that live.

    Raises:
        APRError: What one of them raised, or that there is none.
    """
    living = [result for result in results if not _is_death(result)]
    errors = [result for result in living if isinstance(result, BaseException)]
    if errors:
        raise translated(errors[0], f"{verb} on {len(errors)} of {len(living)} replicas")
    if not living:
        raise none_runs(verb)
    return living
