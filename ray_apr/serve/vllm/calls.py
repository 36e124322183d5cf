"""Calls of a vLLM engine: at the gate, on their way into vLLM, inside of it.

Invariants, kept by `Calls`:
    * Nothing gets into vLLM while the gate is closed.
    * A call that is aborted leaves the gate; what is inside is ended there.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Iterator

from ray_apr.core.exceptions import EngineUnavailableError, RolloutError

CORE_LIMIT_S = 20.0
"""Longest wait for the engine core to take calls in, and for what it has of those that are aborted;
it takes much less than a second, unless it is busy with a long prefill."""


class Call:
    """A call inside of vLLM."""

    def __init__(self) -> None:
        self.core_id = ""
        """Its id in the engine core; none before it has entered, or if it was refused."""
        self.may_stay = False
        """Whether its request may stay in the core when it is interrupted."""
        self.is_parked = False
        """Whether it does so: the call has ended by what was made before."""
        self.entered = asyncio.Event()
        """Set once the core has been sent it."""
        self.ended = asyncio.Event()


class Calls:
    """What an engine has been asked for.

    Args:
        replica_id: Name in errors.
        on_change: Told how many calls are inside, when that changes.

    Attributes:
        running: Calls under way; the event is set when one is aborted, wherever it is.
        inside: Calls that vLLM holds, or that are on their way into it.
        gate: Set while it is open.
    """

    def __init__(self, replica_id: str, on_change: Callable[[int], None]) -> None:
        self._replica_id = replica_id
        self._on_change = on_change
        self.running: dict[str, asyncio.Event] = {}
        self.inside: dict[str, Call] = {}
        self.gate = asyncio.Event()
        self.gate.set()

    @contextlib.contextmanager
    def under_way(self, request_id: str) -> Iterator[asyncio.Event]:
        """While a call is under way; the event tells that it is aborted.

        Raises:
            RolloutError: If one of this id is.
        """
        if request_id in self.running:
            raise RolloutError(f"request {request_id} is under way already")
        aborted = self.running[request_id] = asyncio.Event()
        try:
            yield aborted
        finally:
            del self.running[request_id]

    async def enter(self, aborted: asyncio.Event) -> bool:
        """Wait at the gate; False if the call was aborted there.

        Waits for: the gate. Unblocked by: a resume, an abort, or the core's death.
        """
        while not self.gate.is_set() and not aborted.is_set():
            waits = [asyncio.ensure_future(e.wait()) for e in (self.gate, aborted)]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
        return not aborted.is_set()

    @contextlib.contextmanager
    def going_in(self, request_id: str) -> Iterator[Call]:
        """While vLLM holds a call."""
        call = self.inside[request_id] = Call()
        self._on_change(len(self.inside))
        try:
            yield call
        finally:
            del self.inside[request_id]
            call.entered.set()
            call.ended.set()
            self._on_change(len(self.inside))

    def park(self) -> int:
        """Interrupt the calls inside; how many of their requests stay there."""
        stay = [call for call in self.inside.values() if call.may_stay]
        for call in stay:
            call.is_parked = True
        return len(stay)

    async def until_entered(self, calls: Iterable[Call]) -> None:
        """Wait until the core has been sent these calls.

        Raises:
            EngineUnavailableError: If vLLM does not take one.
        """
        try:
            async with asyncio.timeout(CORE_LIMIT_S):
                for call in list(calls):
                    await call.entered.wait()
        except TimeoutError as error:
            raise EngineUnavailableError(
                f"{self._replica_id}: a call did not get into vLLM within {CORE_LIMIT_S:g} s"
            ) from error

    async def drain(self) -> None:
        """Wait until all calls have come out of vLLM, or the gate is opened.

        Waits for: the calls inside. Unblocked by: their ends, or the gate, which a resume and the
        core's death open.
        """
        while self.inside and not self.gate.is_set():
            call = next(iter(self.inside.values()))  # one by one: there may be thousands
            waits = [asyncio.ensure_future(e.wait()) for e in (call.ended, self.gate)]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
