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
      where it may still run. How long it takes does not matter.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from ray_apr.core.messages import GenerateRequest
from ray_apr.exceptions import APRError, EngineUnavailableError, RolloutError
from ray_apr.serve.errors import ours, without_pages
from ray_apr.serve.mailbox import STREAM_S, Outcome
from ray_apr.types import FinishReason, Generation

_GATHER_S = 0.001
"""Requests that begin within this time go to their replica in one call."""
_SILENT_S = 600.0
"""Limit of one Serve call to a replica that says nothing: a server ends its streams much earlier,
and Serve replaces one that does not answer its health checks (`serve.builder`). What is given up
before that would come out later, and be lost."""


@dataclass
class _Call:
    replica_id: str
    future: asyncio.Future[Generation]
    is_sent: bool = False


class Exchange:
    """The client's side.

    Args:
        find: Returns a handle that leads to a replica; the second argument tells that the last one
            led elsewhere. Raises an `APRError` for a replica that is gone.
    """

    def __init__(self, find: Callable[[str, bool], Awaitable[Any]]) -> None:
        self._id = uuid.uuid4().hex
        self._find = find
        self._calls: dict[str, _Call] = {}
        self._num_calls: Counter[str] = Counter()
        """Of each replica."""
        self._outboxes: dict[str, dict[str, GenerateRequest]] = {}
        """Requests that will be sent in a moment, by replica."""
        self._streams: set[str] = set()
        """Replicas that a stream comes from."""
        self._tasks: set[asyncio.Task[None]] = set()

    def post(self, replica_id: str, request: GenerateRequest) -> asyncio.Future[Generation]:
        """Send a request together with all others of this moment; returns its outcome's future.

        Raises:
            RolloutError: If one with this id has not ended.
        """
        request_id = request.request_id
        if request_id in self._calls:
            raise RolloutError(f"request {request_id} is under way already")
        future: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        self._calls[request_id] = _Call(replica_id, future)
        self._num_calls[replica_id] += 1
        if replica_id not in self._outboxes:
            self._outboxes[replica_id] = {}
            self._begin(self._send(replica_id))
        self._outboxes[replica_id][request_id] = request
        return future

    def withdraw(self, replica_id: str, request_id: str) -> bool:
        """Do not send a request; it ends as an aborted one does.

        Returns:
            Whether it has not been sent.
        """
        if self._outboxes.get(replica_id, {}).pop(request_id, None) is None:
            return False
        aborted = Generation(
            request_id=request_id,
            segments=(),
            finish_reason=FinishReason.ABORT,
            replica_id=replica_id,
        )
        self._end(request_id, aborted)
        return True

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send(self, replica_id: str) -> None:
        """Send what has gathered for a replica, and see to it that a stream brings the outcomes."""
        try:
            await asyncio.sleep(_GATHER_S)
            handle = await self._find(replica_id, False)
        except BaseException as broken:  # noqa: BLE001  (callers get it)
            self._fail(self._outboxes.pop(replica_id), broken)
            return
        outbox = self._outboxes.pop(replica_id)
        if not outbox:
            return
        try:
            async with ours("submit", _SILENT_S):
                there: str = await handle.submit.remote(self._id, list(outbox.values()))
        except BaseException as broken:  # noqa: BLE001  (callers get it)
            self._fail(outbox, broken, handle)
            return
        for request_id in outbox:
            if call := self._calls.get(request_id):  # it may have ended already
                self._num_calls[call.replica_id] -= 1
                self._num_calls[there] += 1
                call.replica_id, call.is_sent = there, True
        if there not in self._streams:
            self._streams.add(there)
            led_there = handle if there == replica_id else None
            self._begin(self._receive(there, led_there))

    async def _receive(self, replica_id: str, handle: Any) -> None:
        """Hand out what a replica streams, as long as it owes an outcome.

        Waits for: outcomes. Unblocked by: the stream's end, the replica's death, the time limit.
        """
        there = replica_id
        try:
            while self._num_calls[replica_id]:
                if there != replica_id or handle is None:
                    handle = None
                    handle = await self._find(replica_id, there != replica_id)
                owed = self._owed_by(replica_id)
                async with ours(f"outcomes of {replica_id}", STREAM_S + _SILENT_S):
                    streamed = handle.options(stream=True).outcomes
                    async for piece in streamed.remote(self._id, replica_id):
                        there, outcomes = piece
                        if outcomes is None:  # an older stream was cut off with them
                            lost = EngineUnavailableError(f"{replica_id}: outcomes are lost")
                            self._fail(owed, lost)
                        for request_id, outcome in outcomes or ():
                            self._end(request_id, outcome)
        except BaseException as broken:  # noqa: BLE001  (callers get it)
            self._fail(self._owed_by(replica_id), broken, handle)
        finally:
            self._streams.discard(replica_id)

    def _owed_by(self, replica_id: str) -> list[str]:
        """Requests that a replica has, and that have not ended here."""
        calls = self._calls.items()
        return [i for i, call in calls if call.replica_id == replica_id and call.is_sent]

    def _fail(self, request_ids: Iterable[str], broken: BaseException, handle: Any = None) -> None:
        """End requests with an error, also on the server if it can be reached.

        Raises:
            BaseException: `broken` itself, if it ends this task from outside.
        """
        ids = [i for i in request_ids if i in self._calls]
        error = EngineUnavailableError(without_pages(broken))
        if isinstance(broken, EngineUnavailableError):
            error = broken
        for request_id in ids:
            self._end(request_id, error)
        if not isinstance(broken, Exception):
            task = asyncio.current_task()  # Serve cancels, too: what it has lost
            if not isinstance(broken, asyncio.CancelledError) or (task and task.cancelling()):
                raise broken
        if handle is not None and ids:
            with contextlib.suppress(RayError, RayServeException):
                handle.abort.remote(ids)

    def _end(self, request_id: str, outcome: Outcome) -> None:
        """Hand out an outcome, unless its caller has gone."""
        call = self._calls.pop(request_id, None)
        if call is None:
            return
        self._num_calls[call.replica_id] -= 1
        if call.future.done():
            return
        if isinstance(outcome, APRError):
            call.future.set_exception(outcome)
        else:
            call.future.set_result(outcome)
