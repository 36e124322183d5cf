"""Requests to rollout servers and their outcomes, many of each in one Serve call.

    client                                     server
    requests of a moment ─────── submit ─────► calls of the engine
    futures ◄─ all outcomes that are there ─── mailbox of this client
                      (one stream)

A Serve call costs milliseconds of CPU on both sides, and an item of a streamed answer about one.
Outcomes therefore travel with others that are there, not with those whose requests began together:
an interruption ends all of a replica's requests at once.

Invariants:
    * A request has one outcome: its own, or that its replica is unavailable; then it is aborted
      where it may still run. How long it takes does not matter.
    * A mailbox has one reader, the newest: what it hands to an older one might reach nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections import Counter
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
)
from dataclasses import dataclass, field
from typing import Any

from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import DeploymentUnavailableError, RayServeException

from ray_apr.core.messages import GenerateRequest
from ray_apr.exceptions import (
    APRError,
    EngineUnavailableError,
    NoEngineError,
    RolloutError,
    one_line,
)
from ray_apr.types import FinishReason, Generation

Outcome = Generation | APRError

_GATHER_S = 0.001
"""Requests that begin within this time go to their replica in one call."""
_TOGETHER_S = 0.003
"""What ends within this time of another request travels with it."""
_LINGER_S = 0.2
"""A stream ends when it has owed nothing for so long."""
_STREAM_S = 60.0
"""It also ends when it is so old; a client that lives asks for the next one."""
_ABANDONED_S = 900.0
"""A client that has not asked for so long is gone."""
_SILENT_S = 600.0
"""Limit of one Serve call to a replica that says nothing: a server ends its streams much earlier,
and Serve replaces one that does not answer its health checks (`serve.builder`). What is given up
before that would come out later, and be lost."""


# -- server ----------------------------------------------------------------------------------------


@dataclass
class _Mailbox:
    num_owed: int = 0
    reader: object = None
    outcomes: list[tuple[str, Outcome]] = field(default_factory=list)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    asked_at: float = field(default_factory=time.monotonic)


class Mailboxes:
    """Outcomes of each client's requests, until it asks for them."""

    def __init__(self) -> None:
        self._boxes: dict[str, _Mailbox] = {}

    def expect(self, client_id: str, count: int) -> None:
        """So many more outcomes will come for a client, which has asked for them."""
        box = self._box(client_id)
        box.num_owed += count
        box.asked_at = time.monotonic()
        for other, box in list(self._boxes.items()):
            if _is_abandoned(box) and box.num_owed == len(box.outcomes):
                del self._boxes[other]

    def put(self, client_id: str, request_id: str, outcome: Outcome) -> None:
        """Keep an outcome for a client; those of one that is gone are dropped."""
        box = self._box(client_id)
        if _is_abandoned(box):
            box.num_owed -= len(box.outcomes)
            box.outcomes.clear()
        box.outcomes.append((request_id, outcome))
        box.arrived.set()

    async def stream(self, client_id: str) -> AsyncIterator[list[tuple[str, Outcome]] | None]:
        """Outcomes of a client, all that are there at a time; None once it is owed none.

        Waits for: the next outcome. Unblocked by: `_STREAM_S`, or a newer stream.
        """
        box = self._box(client_id)
        box.asked_at = began = time.monotonic()
        box.reader = reader = object()
        box.arrived.set()  # for an older reader, which ends then
        while (left_s := began + _STREAM_S - time.monotonic()) > 0:
            try:
                async with asyncio.timeout(left_s if box.num_owed else _LINGER_S):
                    await box.arrived.wait()
            except TimeoutError:
                if not box.num_owed:
                    yield None
                    return
            await asyncio.sleep(_TOGETHER_S)
            if box.reader is not reader:
                return
            outcomes, box.outcomes = box.outcomes, []
            box.arrived.clear()
            box.num_owed -= len(outcomes)
            if outcomes:
                yield outcomes

    def _box(self, client_id: str) -> _Mailbox:
        return self._boxes.setdefault(client_id, _Mailbox())


def _is_abandoned(box: _Mailbox) -> bool:
    return time.monotonic() - box.asked_at > _ABANDONED_S


# -- client ----------------------------------------------------------------------------------------


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
                async with ours(f"outcomes of {replica_id}", _STREAM_S + _SILENT_S):
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
        error = EngineUnavailableError(_one_line(broken))
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


@contextlib.asynccontextmanager
async def ours(what: str, timeout_s: float | None) -> AsyncIterator[None]:
    """A time limit, and Ray's errors as ours."""
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except (RayError, RayServeException, TimeoutError) as error:
        raise translated(error, what) from error


def none_runs(what: str) -> NoEngineError:
    """The error of a call that no rollout server is there for."""
    return NoEngineError(
        f"{what}: no rollout server runs. Their logs say why they ended; a run with several "
        "(rollout.num_replicas) outlives one of them"
    )


def translated(error: BaseException, what: str) -> APRError:
    """The error of ours inside of a Ray error; others become a `RolloutError`."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, APRError):
        return cause
    if isinstance(cause, TimeoutError):
        return RolloutError(f"{what}: no answer within the time limit")
    if isinstance(cause, DeploymentUnavailableError):
        return none_runs(what)
    return EngineUnavailableError(f"{what}: {_one_line(cause)}")


def _one_line(error: BaseException) -> str:
    """An error without the pages that Ray adds to it."""
    said = one_line(error)
    return said if isinstance(error, APRError) else f"{type(error).__name__}: {said}"
