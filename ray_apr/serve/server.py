"""`RolloutServer`: a Ray Serve deployment that owns one engine."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayActorError, RayError

from ray_apr.compat.ray import drained_nodes
from ray_apr.core.exceptions import APRError, EngineDiedError, EngineUnavailableError, RolloutError
from ray_apr.core.messages import (
    GenerateRequest,
    Generation,
    ServerStatus,
    WeightGroup,
    WeightScores,
)
from ray_apr.core.protocols import PauseMode
from ray_apr.serve.engine import make_engine
from ray_apr.serve.mailbox import Mailboxes
from ray_apr.serve.spec import EngineSpec

logger = logging.getLogger(__name__)

_LOOK_S = 1.0
_ABORT_AGAIN_S = 0.5


class RolloutServer:
    """One replica: the verbs of an engine, as Serve calls.

    Args:
        spec: What the engine is built from.
        others: Handles of other engines, which Serve starts for that.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, spec: EngineSpec, *others: Any
    ) -> None:
        del others
        replica_id = serve.get_replica_context().replica_id.unique_id
        self._engine = make_engine(spec, replica_id)
        self._num_pauses = 0
        self._mailboxes = Mailboxes()
        self._calls: set[asyncio.Task[None]] = set()
        self._is_leaving = False
        self._watch: asyncio.Task[None] | None = None
        await self._engine.start()
        if not spec.shares_device:  # else none could be started beside the trainer
            self._watch = asyncio.create_task(self._watch_node(), name="watch-node")

    async def submit(self, client_id: str, requests: Sequence[GenerateRequest]) -> str:
        """Begin calls, whose outcomes this client asks for (`outcomes`).

        Args:
            client_id: Who asks.
            requests: See `Engine.generate`.

        Returns:
            Which replica this is.
        """
        self._mailboxes.expect(client_id, len(requests))
        for request in requests:
            call = asyncio.create_task(self._call(client_id, request))
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)
        return self._engine.replica_id

    async def _call(self, client_id: str, request: GenerateRequest) -> None:
        outcome: Generation | APRError
        try:
            if self._is_leaving:
                raise EngineUnavailableError(f"the node of {self._engine.replica_id} is drained")
            outcome = await self._engine.generate(request)
        except APRError as error:
            outcome = error
        except Exception as error:  # the client waits for an outcome, whatever it is
            logger.exception("request %s", request.request_id)
            outcome = RolloutError(f"request {request.request_id}: {error!r}")
        self._mailboxes.put(client_id, request.request_id, outcome)

    async def outcomes(
        self, client_id: str, replica_id: str
    ) -> AsyncIterator[tuple[str, list[tuple[str, Generation | APRError]] | None]]:
        """Stream the outcomes of a client's calls; see `Mailboxes.stream`.

        Waits for: the next outcome. Unblocked by: what unblocks `Mailboxes.stream`.

        Args:
            client_id: Who asks.
            replica_id: Whom it asks; another one only says who it is.

        Yields:
            Which replica this is, at once and each time, and request id and outcome of those calls
            that have ended; None once all have.
        """
        yield self._engine.replica_id, []
        if replica_id != self._engine.replica_id:
            return
        async for outcomes in self._mailboxes.stream(client_id):
            yield self._engine.replica_id, outcomes

    async def _watch_node(self) -> None:
        """Leave once the node is drained.

        Consumes: Ray's drained nodes. Waits for: the clock. Unblocked by: the drain, or the end of
        this process. Produces: what `leave` does.
        """
        node = ray.get_runtime_context().get_node_id()
        while True:
            try:
                if node in await asyncio.to_thread(drained_nodes):
                    break
            except RayError as error:  # Ray's own limit; it may answer the next time
                logger.warning("whether node %s is drained is unknown: %s", node, error)
            await asyncio.sleep(_LOOK_S)
        logger.warning("node %s is drained: its engine leaves", node)
        await self.leave()

    async def leave(self) -> None:
        """Give all calls back with what they have, and take no others: Serve starts another replica
        on another node, and ends this one.

        Waits for: the ends of the calls. Unblocked by: the engine, or its death.
        """
        self._is_leaving = True
        while calls := set(self._calls):
            with contextlib.suppress(EngineUnavailableError):  # of a dead one they end
                await self._engine.abort(None)
            await asyncio.wait(calls, timeout=_ABORT_AGAIN_S)

    async def abort(self, request_ids: Sequence[str] | None = None) -> int:
        """Stop calls; see `Engine.abort`."""
        return await self._engine.abort(request_ids)

    async def pause(self, mode: PauseMode) -> None:
        """Freeze; see `Engine.pause`."""
        self._num_pauses += 1
        await self._engine.pause(mode)

    async def sleep(self, mode: PauseMode) -> None:
        """Leave the device to a train worker; see `Engine.sleep`."""
        self._num_pauses += 1
        await self._engine.sleep(mode)

    async def resume(self) -> None:
        """Unfreeze; see `Engine.resume`."""
        await self._engine.resume()

    async def is_paused(self) -> bool:
        """Whether the engine is frozen."""
        return self._engine.status(drain=False).is_paused

    async def replica_id(self) -> str:
        """Which replica answers."""
        return self._engine.replica_id

    async def status(self, drain: bool = True) -> ServerStatus:
        """Figures of this moment; see `Engine.status`."""
        status = self._engine.status(drain=drain)
        return dataclasses.replace(status, is_leaving=self._is_leaving)

    async def join_weight_group(self, group: WeightGroup, first_ranks: Mapping[str, int]) -> bool:
        """Join the weight group as the rank that belongs to this replica.

        Returns:
            Whether there is one: a replica that comes meanwhile joins the next group.

        Raises:
            WeightSyncError: If the members do not meet.
        """
        first_rank = first_ranks.get(self._engine.replica_id)
        if first_rank is None:
            return False
        await self._engine.join_weight_group(group, first_rank)
        return True

    async def receive_weights(
        self,
        policy_version: int,
        members: Collection[str],
        notice: bytes = b"",
        resume: bool = False,
    ) -> bool:
        """Take one set of weights, if this replica is a member, and go on if `resume` says so; see
        `Engine.receive_weights`.

        Returns:
            Whether it is one.
        """
        is_member = self._engine.replica_id in members
        num_pauses = self._num_pauses
        if is_member:
            await self._engine.receive_weights(policy_version, notice)
        if resume and self._num_pauses == num_pauses:  # else the next sync has begun
            await self._engine.resume()
        return is_member

    async def expect_scores(self, policy_version: int, sequences: Sequence[Sequence[int]]) -> None:
        """Score sequences once the weights of a version are there; see `ScoringEngine`."""
        self._engine.expect_scores(policy_version, sequences)

    async def weight_scores(self) -> WeightScores | None:
        """What was scored last; None if nothing was since `expect_scores`."""
        scores: WeightScores | None = self._engine.scores
        return scores

    async def probe_weights(
        self, replica_id: str, token_ids: Sequence[int]
    ) -> Mapping[str, list[list[float]]]:
        """What each module computes, if this is the replica; see `Engine.probe_weights`."""
        if replica_id != self._engine.replica_id:
            return {}
        return await self._engine.probe_weights(token_ids)

    async def check_health(self) -> None:
        """Serve replaces the replica when this raises: of an engine that is dead at once.

        Raises:
            RayActorError: If it is. Serve takes it for the end of this process, which it acts upon
                at the first time; of any other error it waits for the third in a row.
        """
        if self._watch is not None and self._watch.done():
            self._watch.result()
        try:
            await self._engine.check_health()
        except EngineDiedError as error:
            raise RayActorError(self._engine.replica_id, str(error)) from error

    def __del__(self) -> None:
        engine = getattr(self, "_engine", None)  # missing if the constructor failed early
        if engine is not None:
            engine.shutdown()
