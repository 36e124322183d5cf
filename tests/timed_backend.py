"""The engine of tests/scripted_backend.py for many thousands of calls: one timer for each.

Settings beside that one's: ``token_s``, seconds of a token; ``log``, a file that gets a row for
each weight sync.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from pathlib import Path

from tests.scripted_backend import ScriptedBackend, _Call, reward

__all__ = ["TimedBackend", "reward"]


class TimedBackend(ScriptedBackend):
    """A call is over when the time of its tokens is, or when it is aborted."""

    def __init__(self, spec, replica_id: str) -> None:
        super().__init__(spec, replica_id)
        self._token_s = spec.engine_kwargs["token_s"]
        self._log = Path(spec.engine_kwargs["log"])
        self._aborted: dict[int, asyncio.Event] = {}
        """Of calls that run, by their identity."""
        self._going = asyncio.Event()
        self._going.set()
        self._row: dict[str, float] = {}
        self._at = time.monotonic()
        """Begin of what is measured."""

    async def _until_resumed(self, call: _Call) -> None:
        await self._going.wait()

    async def _make(self, call: _Call) -> None:
        aborted = self._aborted[id(call)] = asyncio.Event()
        version, began = self._version, time.monotonic()
        self._note("until_as_many_run_s", len(self._aborted) >= 0.95 * self._row.get("calls", 1e9))
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._token_s * call.length):
                    await aborted.wait()
        finally:
            del self._aborted[id(call)]
        num_made = call.length
        if call.is_aborted:
            num_made = min(call.length, int((time.monotonic() - began) / self._token_s))
        call.made = [(version, self._draw()) for _ in range(num_made)]

    def _note(self, what: str, is_so: bool) -> None:
        if self._is_paused or what in self._row or not is_so:
            return
        self._row[what] = round(time.monotonic() - self._at, 3)
        with self._log.open("a") as log:
            log.write(json.dumps(self._row) + "\n")

    async def abort(self, request_ids=None) -> int:
        num = await super().abort(request_ids)
        self._wake()
        return num

    async def pause(self, mode) -> None:
        self._row = {"calls": len(self._aborted)}
        self._going.clear()
        await super().pause(mode)
        self._wake()

    def _wake(self) -> None:
        for call in self._calls.values():
            if call.is_aborted and id(call) in self._aborted:
                self._aborted[id(call)].set()

    async def resume(self) -> None:
        await super().resume()
        self._at = time.monotonic()
        self._going.set()
