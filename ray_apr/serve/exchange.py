"""Requests to rollout servers and their outcomes, many of each in one Serve call: the client's end.

    client                                     server (`serve.mailbox`)
    requests of a moment ─────── submit ─────► calls of the engine
    futures ◄─ all outcomes that are there ─── mailbox of this client
                      (one stream)

A Serve call costs milliseconds of CPU on both sides, and an item of a streamed answer about one.
Outcomes therefore travel with others that are there, not with those whose requests began together:
an interruption ends all of a replica's requests at once.

Invariants:
    * A request has one outcome: its own, or that its replica is unavailable; then it is aborted
      where it may still run. How long it takes does not matter. `EngineDiedError` is for those that
      the replica had, or was being sent, when it died.
    * Tokens that come once nobody waits for them, which their engine has counted, are told.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from ray_apr.core.exceptions import (
    APRError,
    EngineDiedError,
    EngineUnavailableError,
    NoEngineError,
    RolloutError,
)
from ray_apr.core.messages import GenerateRequest, Generation
from ray_apr.core.sample import FinishReason
from ray_apr.serve.errors import ours, without_pages
from ray_apr.serve.handle import EngineHandle
from ray_apr.serve.mailbox import STREAM_S, Outcome

_GATHER_S = 0.001
"""Requests that begin within this time go to their replica in one call."""
_AT_ONCE = 32
"""Outcomes that are handed out between two turns of the event loop: a sync may end thousands of
requests at a time, and those who get them have work to do, for which a sync's own messages would
wait."""
_LISTEN_S = 2.0
"""A replica says at once that it streams; one that is silent for so long is asked whether it is."""
_SILENT_S = 600.0
"""Limit of one Serve call to a replica that says nothing: a server ends its streams much earlier,
and Serve replaces one that does not answer its health checks (`serve.builder`). What is given up
before that would come out later, and be lost."""


@dataclass
class _Call:
    future: asyncio.Future[Generation]
    replica_id: str = ""
    """Who has it; nobody, until it is sent."""


class Exchange:
    """The client's side.

    Args:
        engines: By their names.
        on_late: Gets what has come of a request once nobody waits for it any more.
    """

    def __init__(
        self, engines: Mapping[str, EngineHandle], on_late: Callable[[Generation], None]
    ) -> None:
        self._id = uuid.uuid4().hex
        self._engines = engines
        self._on_late = on_late
        self._calls: dict[str, _Call] = {}
        self._num_calls: Counter[str] = Counter()
        """Of each replica."""
        self._outboxes: dict[str, dict[str, GenerateRequest]] = {}
        """Requests that will be sent in a moment, by engine."""
        self._streams: set[str] = set()
        """Replicas that a stream comes from."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._flows = asyncio.Event()
        self._flows.set()

    @contextlib.contextmanager
    def held_back(self) -> Iterator[None]:
        """Hand out no outcomes in here: what they set off would delay what is waited for in here,
        and all engines stand still as long."""
        self._flows.clear()
        try:
            yield
        finally:
            self._flows.set()

    def post(self, engine: str, request: GenerateRequest) -> asyncio.Future[Generation]:
        """Send a request together with all others of this moment; returns its outcome's future.

        Raises:
            RolloutError: If one with this id has not ended.
        """
        request_id = request.request_id
        if request_id in self._calls:
            raise RolloutError(f"request {request_id} is under way already")
        future: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        self._calls[request_id] = _Call(future)
        if engine not in self._outboxes:
            self._outboxes[engine] = {}
            self._begin(self._send(engine))
        self._outboxes[engine][request_id] = request
        return future

    def withdraw(self, engine: str, request_id: str) -> bool:
        """Do not send a request; it ends as an aborted one does.

        Returns:
            Whether it has not been sent.
        """
        if self._outboxes.get(engine, {}).pop(request_id, None) is None:
            return False
        reason = FinishReason.ABORT
        self._end(request_id, Generation(request_id=request_id, segments=(), finish_reason=reason))
        return True

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send(self, engine: str) -> None:
        """Send what has gathered for an engine, and see to it that a stream brings the outcomes."""
        await asyncio.sleep(_GATHER_S)
        outbox = self._outboxes.pop(engine)
        if not outbox:  # all were withdrawn; the engine may have left
            return
        handle, requests = self._engines[engine], list(outbox.values())
        try:
            async with ours("submit", None):
                there: str = await handle.call("submit", self._id, requests, timeout_s=_SILENT_S)
        except BaseException as broken:  # noqa: BLE001  (callers get it)
            self._fail(outbox, broken, handle)
            return
        for request_id in outbox:
            if call := self._calls.get(request_id):  # it may have ended already
                self._num_calls[there] += 1
                call.replica_id = there
        if there not in self._streams:
            self._streams.add(there)
            self._begin(self._receive(there, handle))

    async def _receive(self, replica_id: str, handle: EngineHandle) -> None:
        """Hand out what a replica streams, as long as it owes an outcome; once more where a stream
        broke off and the replica may live: it has tokens of the calls that have failed here."""
        comes_late = False
        try:
            while self._num_calls[replica_id] or comes_late:
                comes_late = False
                try:
                    await self._listen(replica_id, handle)
                except BaseException as broken:  # noqa: BLE001  (callers get it)
                    if isinstance(broken, NoEngineError):
                        broken = EngineDiedError(f"{replica_id} is gone")
                    owed = self._owed_by(replica_id)
                    self._fail(owed, broken, handle)
                    is_dead = isinstance(broken, EngineDiedError)
                    comes_late = bool(owed) and isinstance(broken, Exception) and not is_dead
        finally:
            self._streams.discard(replica_id)

    async def _listen(self, replica_id: str, handle: EngineHandle) -> None:
        """Hand out what comes by one stream.

        Waits for: outcomes, and the end of `held_back`. Unblocked by: the stream's end, the
        replica's death, the time limit.
        """
        owed = self._owed_by(replica_id)
        async with ours(f"outcomes of {replica_id}", STREAM_S + _SILENT_S):
            pieces = handle.stream("outcomes", self._id, replica_id)
            await self._until_there(pieces, replica_id, handle)
            async for _, outcomes in pieces:
                if outcomes is None:  # an older stream was cut off with them
                    self._fail(owed, EngineUnavailableError(f"{replica_id}: outcomes are lost"))
                for number, (request_id, outcome) in enumerate(outcomes or ()):
                    if number % _AT_ONCE == 0:
                        await asyncio.sleep(0)
                        await self._flows.wait()
                    self._end(request_id, outcome)

    @staticmethod
    async def _until_there(
        pieces: AsyncIterator[Any], replica_id: str, handle: EngineHandle
    ) -> None:
        """Wait for the first piece of a stream, which says who is there; where it does not come,
        ask: Serve holds the stream of a replica that has died back until there is another one.

        Waits for: that piece. Unblocked by: it, the answer of another replica, or `_SILENT_S`
        without an answer.

        Raises:
            EngineDiedError: If it is another one.
        """
        first = asyncio.ensure_future(anext(pieces))
        try:
            while not first.done():
                await asyncio.wait({first}, timeout=_LISTEN_S)
                if not first.done():
                    there = await handle.call("replica_id", timeout_s=_SILENT_S)
                else:
                    there, _ = first.result()
                if there != replica_id:
                    raise EngineDiedError(f"{replica_id} is gone")
        finally:
            first.cancel()

    def _owed_by(self, replica_id: str) -> list[str]:
        """Requests that a replica has, and that have not ended here."""
        calls = self._calls.items()
        return [i for i, call in calls if call.replica_id == replica_id]

    def _fail(
        self, request_ids: Iterable[str], broken: BaseException, handle: EngineHandle | None = None
    ) -> None:
        """End requests with an error, also on the server if it can be reached.

        Raises:
            BaseException: `broken` itself, if it ends this task from outside.
        """
        ids = [i for i in request_ids if i in self._calls]
        error = EngineUnavailableError(without_pages(broken))
        if isinstance(broken, NoEngineError):  # others may have one
            error = EngineUnavailableError("the engine has no replica")
        elif isinstance(broken, EngineUnavailableError):
            error = broken
        for request_id in ids:
            self._end(request_id, error)
        if not isinstance(broken, Exception):
            task = asyncio.current_task()  # Serve cancels, too: what it has lost
            if not isinstance(broken, asyncio.CancelledError) or (task and task.cancelling()):
                raise broken
        if handle is not None and ids:
            with contextlib.suppress(RayError, RayServeException):
                handle.tell("abort", ids)

    def _end(self, request_id: str, outcome: Outcome) -> None:
        """Hand out an outcome, unless its caller has gone."""
        call = self._calls.pop(request_id, None)
        if call is not None and call.replica_id:
            self._num_calls[call.replica_id] -= 1
        if call is None or call.future.done():
            if isinstance(outcome, Generation):
                self._on_late(outcome)
            return
        if isinstance(outcome, APRError):
            call.future.set_exception(outcome)
        else:
            call.future.set_result(outcome)
