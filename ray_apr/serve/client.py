"""The client of all rollout servers: a `RolloutClient` over one Serve application.

Invariants, kept by `ServeRolloutClient`:
    * Requests of one session share an engine as long as one of them runs (prefix-cache hits); a
      session that begins goes to the engine with the fewest requests.
    * A control verb reaches every engine that lives, or raises what the first of the others said.
      A replica whose engine is dead is dead, though its process lives until Serve replaces it.
    * Every control call has a time limit. A generate call ends with its engine's progress: the
      server sees to that, and Serve to servers that do not answer.
    * A request whose caller has gone is aborted where it runs.

A handle is an engine (`serve.handle`). Those get requests whose replica answers, makes tokens and
has the newest weights, as their statuses say, which are asked for anew when one fails. How many
there are changes by `scale`: one that leaves gives its requests back with their tokens so far.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import DeploymentUnavailableError, RayServeException

from ray_apr.config import RolloutConfig
from ray_apr.core.exceptions import EngineUnavailableError, RolloutError, SyncBrokenError
from ray_apr.core.messages import (
    GenerateRequest,
    Generation,
    ServerStatus,
    WeightGroup,
    WeightGroupState,
    WeightScores,
)
from ray_apr.core.protocols import PauseMode
from ray_apr.scheduling.routing import Placement, newest_version, that_stay, that_take
from ray_apr.serve.departure import Departure
from ray_apr.serve.errors import of_living, ours
from ray_apr.serve.exchange import Exchange
from ray_apr.serve.handle import EngineHandle, engine_names
from ray_apr.serve.spec import SCORE_LIMIT_S

logger = logging.getLogger(__name__)

_CONTROL_TIMEOUT_S = 60.0
_LEARN_S = 10.0
"""An engine that does not answer for so long gets no requests; all requests may wait for it."""
_LEARN_AGAIN_S = 5.0
"""Pause of the question whether an engine that got no requests can take some now."""
_NONE_S = 0.5
"""For so long none takes any, after the answer that none does: many requests may wait."""


class ServeRolloutClient:
    """All replicas of one application.

    Args:
        app_name: Name of the Serve application.
        config: Number of replicas at the start, and time limits.
        max_inflight: Most requests of one replica, until `set_limits` says otherwise.
        weight_sync_timeout_s: Limit for the replicas to receive weights.
        policy_version: Version that the servers had last.
    """

    def __init__(
        self,
        app_name: str,
        config: RolloutConfig,
        *,
        max_inflight: int = 1024,
        weight_sync_timeout_s: float = 120.0,
        policy_version: int = 0,
    ) -> None:
        self._app_name = app_name
        self._engines = {n: EngineHandle(app_name, n) for n in engine_names(config.num_replicas)}
        self._departure = Departure()
        """Of engines that get no more requests."""
        self._config = config
        self._weight_sync_timeout_s = weight_sync_timeout_s
        self._ready: dict[str, str] = {}
        """Replica of each engine that gets requests."""
        self._seen: Mapping[str, ServerStatus] = {}
        """What each engine said last."""
        self._learned_at = -math.inf
        """When they were learned; if never, they have to be before the next request."""
        self._asking: asyncio.Task[None] | None = None
        """Asks the others again."""
        self._none_until, self._why_none = -math.inf, ""
        self.on_late: Callable[[Generation], None] = lambda generation: None
        self._exchange = Exchange(self._engines, lambda late: self.on_late(late))  # noqa: PLW0108
        self._learning = asyncio.Lock()
        self._placement = Placement((), limit=max_inflight)
        self._max_inflight = max_inflight
        self._members: frozenset[str] = frozenset()
        """Replicas that have joined the weight group."""
        self._policy_version = policy_version
        """Newest version that is known to be with the servers."""
        self._placed: dict[str, str] = {}
        """Engine of each request under way."""

    # -- generation ------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> Generation:
        """Continue a prompt; see `RolloutClient`.

        Raises:
            RolloutError: If the request is refused, or has the id of another one that is under way.
            EngineUnavailableError: If no engine takes it, or its engine ended; no fault of it.
        """
        await self._find_ready()
        request_id = request.request_id
        if request_id in self._placed:
            raise RolloutError(f"request {request_id} is under way already")
        engine = self._placement.enter(request.sample_id, request.session_id)
        self._placed[request_id] = engine
        least = max(request.min_policy_version, self._policy_version)
        request = dataclasses.replace(request, min_policy_version=least)
        try:
            generation = await self._outcome(engine, request)
        except EngineUnavailableError:
            self._learned_at = -math.inf  # a replica may be gone
            raise
        finally:
            del self._placed[request_id]
            self._placement.leave(engine)
            self._departure.on_end()
        newest = max((segment.policy_version for segment in generation.segments), default=0)
        self._policy_version = max(self._policy_version, newest)
        return generation

    async def _outcome(self, engine: str, request: GenerateRequest) -> Generation:
        """Send a request, and wait for its end.

        Waits for: the outcome. Unblocked by: the replica, which ends what does not go on; its
        death; the limit of `Exchange` for one that says nothing.
        """
        future = self._exchange.post(engine, request)
        try:
            return await future
        finally:
            if future.cancelled() and not self._exchange.withdraw(engine, request.request_id):
                with contextlib.suppress(RayError, RayServeException, KeyError):  # it has left
                    self._engines[engine].tell("abort", [request.request_id])

    def set_limits(self, limits: Mapping[str, int]) -> None:
        """Give each replica at most this many requests from now on; unknown ones are left out."""
        for engine, replica_id in self._ready.items():
            if replica_id in limits:
                self._placement.set_limit(engine, limits[replica_id])

    async def _find_ready(self) -> None:
        """See to it that some engines are known to take requests; where some others do not, ask
        them again after a while, which nobody waits for."""
        if self._learned_at == -math.inf:
            try:
                await self._learn()
            except RolloutError as error:  # also where a server does not answer in time
                raise EngineUnavailableError(str(error)) from error
            return
        is_due = time.monotonic() - self._learned_at > _LEARN_AGAIN_S
        is_asking = self._asking is not None and not self._asking.done()
        if len(self._ready) < len(self._engines) and is_due and not is_asking:
            self._learned_at = time.monotonic()
            self._asking = asyncio.create_task(self._ask_again(), name="ask-engines")

    async def _ask_again(self) -> None:
        try:
            await self._learn(again=True)
        except RolloutError as error:
            logger.info("engines that got no requests are not asked: %s", error)

    async def _learn(self, *, again: bool = False) -> None:
        """Find out which engines can take requests, of those that answer, unless somebody just has.

        Waits for: somebody who is at it. Unblocked by: the engines' answers, or `_LEARN_S`.
        """
        async with self._learning:
            if self._learned_at != -math.inf and not again:
                return
            if not again and time.monotonic() < self._none_until:
                raise EngineUnavailableError(self._why_none)
            try:
                running = await self._statuses(drain=False, learns=True)
                # a client that begins beside engines which have run knows of no version of theirs
                self._policy_version = newest_version(running, self._policy_version)
                leave = running.keys() - (self._engines.keys() - self._departure.engines)
                ready = that_take(running, self._policy_version, leave)
            except RolloutError as error:
                self._none_until, self._why_none = time.monotonic() + _NONE_S, str(error)
                raise
            self._set_ready(ready)

    def _set_ready(self, ready: dict[str, str]) -> None:
        if ready.keys() != self._ready.keys():
            self._placement.change(ready, limit=self._max_inflight)
        self._ready, self._learned_at = ready, time.monotonic()

    # -- engines that come and go ----------------------------------------------------------------

    async def scale(self, num_engines: int) -> list[ServerStatus]:
        """Have so many engines from now on, which run; see `RolloutClient`.

        Waits for: who learns which engines are ready. Unblocked by: its end, which has a limit.
        """
        names = engine_names(num_engines)
        come = [name for name in names if name not in self._engines]
        self._engines.update({name: EngineHandle(self._app_name, name) for name in come})
        leaving = {e: handle for e, handle in self._engines.items() if e not in names}
        if not leaving:
            return []
        async with self._learning:
            stay = {e: replica for e, replica in self._ready.items() if e not in leaving}
            if self._ready and not stay:
                raise EngineUnavailableError(
                    f"none of the {num_engines} engines that would stay takes requests now"
                )
            self._ready, self._departure = stay, Departure(leaving, self._placed)
            self._placement.change(stay, limit=self._max_inflight)
        try:
            await self._departure.end_requests(self.abort)
            last = await self._departure.last_statuses()
            for engine in leaving:
                del self._engines[engine]
        finally:
            self._departure = Departure()
        return last

    # -- control ---------------------------------------------------------------------------------

    async def abort(self, request_ids: Sequence[str] | None = None) -> int:
        """Abort these requests where they run (None: all, on all engines)."""
        if request_ids is None:
            return await self.abort_anywhere(None)
        by_engine: dict[str, list[str]] = {}
        num_unsent = 0
        for request_id in request_ids:
            engine = self._placed.get(request_id)
            if engine is not None and self._exchange.withdraw(engine, request_id):
                num_unsent += 1
            elif engine in self._engines:  # one that has left may have kept it
                by_engine.setdefault(engine, []).append(request_id)
        calls = [
            self._engines[engine].call("abort", ids, timeout_s=_CONTROL_TIMEOUT_S)
            for engine, ids in by_engine.items()
        ]
        results = await asyncio.gather(*calls, return_exceptions=True)
        # what a dead one has ends by itself
        return num_unsent + sum(of_living([0, *results], "abort"))

    async def abort_anywhere(self, request_ids: Sequence[str] | None) -> int:
        """Abort requests that may have come in through another client."""
        return sum(await self._all("abort", None if request_ids is None else list(request_ids)))

    async def pause(self, mode: PauseMode) -> None:
        """Freeze all engines; with "wait" once what runs has ended."""
        with self._exchange.held_back() if mode == "abort" else contextlib.nullcontext():
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
        """One status for each replica, in order of the engines.

        Args:
            drain: Whether the spans since the last status are taken along; only one reader may.
        """
        return list((await self._statuses(drain=drain)).values())

    async def _statuses(self, *, drain: bool, learns: bool = False) -> dict[str, ServerStatus]:
        """Status of each engine that lives, by its name; who learns takes those that answer."""
        engines = list(self._engines)  # some may come or go meanwhile
        limit_s = _LEARN_S if learns else _CONTROL_TIMEOUT_S
        results = await self._ask("status", drain, timeout_s=limit_s)
        said = {e: s for e, s in zip(engines, results, strict=True) if isinstance(s, ServerStatus)}
        if not (learns and said):
            of_living(results, "status")
        self._seen = said
        return dict(said)

    async def weight_group_state(self) -> WeightGroupState:
        """Which replicas run and stay; they get ranks in order of the engines, from 1 on."""
        staying = that_stay(await self.status(drain=False))
        size = self._config.engine.tensor_parallel_size
        return WeightGroupState(
            first_ranks={status.replica_id: 1 + i * size for i, status in enumerate(staying)},
            num_workers=len(staying) * size,
            is_whole=self._members == {status.replica_id for status in staying},
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
                given = (group, dict(first_ranks))
                took_part = await asyncio.gather(
                    *(self._joined(e, *given, timeout_s=limit_s) for e in self._engines.values())
                )
        except RolloutError as error:  # one is dead, or does not answer
            raise SyncBrokenError(str(error)) from error
        if sum(took_part) < len(first_ranks):
            raise SyncBrokenError(f"only {sum(took_part)} of {len(first_ranks)} servers live")
        self._members = frozenset(first_ranks)

    @staticmethod
    async def _joined(engine: EngineHandle, *given: Any, timeout_s: float) -> bool:
        """Whether an engine has joined; one that has no replica is in no group."""
        try:
            return bool(await engine.call("join_weight_group", *given, timeout_s=timeout_s))
        except DeploymentUnavailableError:
            return False

    async def receive_weights(
        self, policy_version: int, notice: bytes = b"", *, resume: bool = False
    ) -> None:
        """Receive all weights on all replicas of the group.

        One that dies meanwhile does not count; the group is not whole then.

        Raises:
            SyncBrokenError: If one that lives did not receive them, or none did.
        """
        engines, members = list(self._engines), sorted(self._members)
        try:
            results = await self._ask(
                "receive_weights", policy_version, members, notice, resume,
                timeout_s=self._weight_sync_timeout_s,
            )  # fmt: skip
            received = of_living(results, "receive_weights")
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
        if self._members != set(self._ready.values()):  # nobody waits for those that have come
            took = [e for e, took in zip(engines, results, strict=True) if took is True]
            seen = [(e, self._seen[e]) for e in took if e in self._seen]
            ready = {e: status.replica_id for e, status in seen if not status.is_lost}
            if ready and self._members.issuperset(ready.values()):
                self._set_ready(ready)
            else:
                self._learned_at = -math.inf

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
        return next(filter(None, await self._all("probe_weights", replica_id, token_ids)), {})

    async def _all(
        self, verb: str, *args: Any, timeout_s: float | None = _CONTROL_TIMEOUT_S
    ) -> list[Any]:
        """Call every engine that lives; raise what the first one of them raised."""
        return of_living(await self._ask(verb, *args, timeout_s=timeout_s), verb)

    async def _ask(
        self, verb: str, *args: Any, timeout_s: float | None = _CONTROL_TIMEOUT_S
    ) -> list[Any]:
        """Answer or error of each engine."""
        calls = [e.call(verb, *args, timeout_s=timeout_s) for e in self._engines.values()]
        return await asyncio.gather(*calls, return_exceptions=True)
