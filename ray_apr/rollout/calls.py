"""Calls of the user's code in one reward worker, and their outcomes, many of each in one call of
its actor.

    caller (`Calls`)                            worker (`Outcomes`)
    calls of a moment ───────── exchange ─────► tasks
    futures ◄──── all outcomes that are there ── box

A call of an actor costs nearly a millisecond of CPU time on each side, more than most rewards.
Outcomes travel with others that are there, not with those whose calls began together: a slow one
holds nothing up. As long as the worker owes an outcome, an `exchange` waits there for it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ray import cloudpickle
from ray.exceptions import RayError

from ray_apr.core.exceptions import RewardError, StepError, UserCodeError
from ray_apr.core.sample import Sample
from ray_apr.core.user import RewardResult, Step

Call = Literal["score", "reset", "step"]
ERRORS: dict[Call, type[UserCodeError]] = {
    "score": RewardError,
    "reset": StepError,
    "step": StepError,
}
Answer = RewardResult | Step
Outcome = Answer | UserCodeError

_GATHER_S = 0.001
"""Calls that begin, and outcomes that come, within this time travel together."""


class Outcomes:
    """The worker's end.

    Args:
        answer: Makes one call; raises `UserCodeError`.
    """

    def __init__(self, answer: Callable[[Call, Sample, float], Awaitable[Answer]]) -> None:
        self._answer = answer
        self._tasks: set[asyncio.Task[None]] = set()
        self._box: list[tuple[int, bytes]] = []
        self._num_owed = 0
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._is_taken_up = False
        """Whether an exchange will take what is in the box: the others go on waiting."""

    async def exchange(self, requests: Sequence[tuple[int, bytes]]) -> list[tuple[int, bytes]]:
        """Begin calls, each with its number and pickled; returns numbers and pickled outcomes of
        these and earlier ones that are there, at least one unless another exchange takes the last.
        What cannot be pickled or read is a string that says why.

        Waits for: an outcome. Unblocked by: it, or another `exchange` that takes the last one; a
        call that takes too long is up to the caller, who kills this process.
        """
        self._num_owed += len(requests)
        for request in requests:
            task = asyncio.create_task(self._make(*request))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        if self._num_owed and (self._is_taken_up or not self._box):
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter
        self._is_taken_up = bool(self._box)
        if self._num_owed > len(self._box):
            await asyncio.sleep(_GATHER_S)
        outcomes, self._box = self._box, []
        self._num_owed -= len(outcomes)
        self._is_taken_up = False
        while not self._num_owed and self._wake():
            pass
        return outcomes

    def _wake(self) -> bool:
        """Have the exchange that waits longest go on; whether there is one."""
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return True
        return False

    async def _make(self, number: int, pickled: bytes) -> None:
        """Make one call, and put its outcome into the box.

        Waits for: the answer. Unblocked by: it, which `RewardWorker.call` limits.
        """
        try:
            what, sample, limit_s = cloudpickle.loads(pickled)
            try:
                outcome: Outcome = await self._answer(what, sample, limit_s)
            except UserCodeError as error:
                outcome = ERRORS[what](*error.args)  # the caller may not know a class of the user's
            answer = cloudpickle.dumps(outcome)
        except Exception as error:  # noqa: BLE001  (whatever the user's objects raise on their way)
            answer = cloudpickle.dumps(_told(error))
        self._box.append((number, answer))
        if not self._is_taken_up:
            self._is_taken_up = self._wake()


@dataclass(frozen=True, slots=True)
class _Pending:
    future: asyncio.Future[Answer]
    what: Call
    sample_id: str


class Calls:
    """The caller's end.

    Args:
        worker: Handle of a `RewardWorker`.
    """

    def __init__(self, worker: Any) -> None:
        self.worker = worker
        self._pending: dict[int, _Pending] = {}
        self._number = 0
        self._outbox: list[tuple[int, bytes]] = []
        self._num_owed = 0
        """Calls that the worker has."""
        self._num_exchanges = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._starting = asyncio.Lock()
        self._num_waiting = 0
        """Calls that wait until the worker is ready."""
        self.is_ready = False
        """Whether the worker's process has started."""
        self.is_given_up = False
        """Whether its process was killed, as a call did not return."""
        self.is_stuck = False
        """Whether that did nothing at all any more, so that any of its calls may be the cause."""
        self._ready_by: float | None = None

    @property
    def load(self) -> int:
        """Calls that have no outcome yet."""
        return len(self._pending) + self._num_waiting

    async def ready(self, limit_s: float) -> None:
        """Wait until the worker's process has started, so that no call's limit counts that.

        Waits for: an exchange without calls. Unblocked by: its end, the worker's death, or the
        limit, which begins with the first call that waits.

        Raises:
            TimeoutError: If it has not started within the limit.
            RayError: If it died.
        """
        if self.is_ready:
            return
        if self._ready_by is None:
            self._ready_by = asyncio.get_running_loop().time() + limit_s
        self._num_waiting += 1
        try:
            async with asyncio.timeout_at(self._ready_by), self._starting:
                if not self.is_ready:
                    await self.worker.exchange.remote([])
                    self.is_ready = True
        finally:
            self._num_waiting -= 1

    async def lives(self, limit_s: float) -> bool:
        """Whether the worker's process does anything at all.

        Waits for: its answer. Unblocked by: that, its death, or the limit.
        """
        try:
            async with asyncio.timeout(limit_s):
                await self.worker.lives.remote()
        except (TimeoutError, RayError):
            return False
        return True

    async def make(self, what: Call, sample: Sample, limit_s: float) -> Answer:
        """Make a call together with all others of this moment.

        Waits for: its outcome. Unblocked by: it, the worker's death, or the caller, who gives up
        after some time.

        Raises:
            UserCodeError: If it failed.
            RayError: If the worker died, or does not answer as it should: it is of no use then.
        """
        self._number += 1
        number, pickled = self._number, cloudpickle.dumps((what, sample, limit_s))
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._pending[number] = _Pending(future, what, sample.sample_id)
        if not self._outbox:
            self._begin(self._send())
        self._outbox.append((number, pickled))
        try:
            return await future
        finally:
            self._pending.pop(number, None)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send(self) -> None:
        """Send what has gathered, and hand out outcomes as long as nobody else waits for them.

        Waits for: outcomes. Unblocked by: them, or the worker's death.
        """
        await asyncio.sleep(_GATHER_S)
        requests = [request for request in self._outbox if request[0] in self._pending]
        self._outbox = []
        self._num_owed += len(requests)
        self._num_exchanges += 1
        try:
            while True:
                for number, outcome in await self.worker.exchange.remote(requests):
                    self._num_owed -= 1
                    self._end(number, outcome)
                requests = []
                if not self._num_owed or self._num_exchanges > 1:
                    return
        except Exception as error:  # noqa: BLE001  (callers get it)
            for pending in self._pending.values():
                if not pending.future.done():
                    pending.future.set_exception(error)
        finally:
            self._num_exchanges -= 1

    def _end(self, number: int, pickled: bytes) -> None:
        """Hand out an outcome, unless its caller has gone."""
        pending = self._pending.get(number)
        if pending is None or pending.future.done():
            return
        try:
            outcome: Outcome | str = cloudpickle.loads(pickled)
        except Exception as error:  # noqa: BLE001  (whatever the user's objects raise)
            outcome = _told(error)
        if isinstance(outcome, str):
            detail = f"the sample or the answer cannot travel between processes: {outcome}"
            outcome = ERRORS[pending.what](pending.sample_id, "invalid", detail)
        if isinstance(outcome, UserCodeError):
            pending.future.set_exception(outcome)
        else:
            pending.future.set_result(outcome)


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
