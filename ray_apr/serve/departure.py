"""Engines that leave a client: their requests come back, and their last figures are read.

Invariants, kept by `Departure`:
    * What an engine has made for a request comes back with it. An engine that does not give its
      requests back in time loses them, as at its death.
    * The figures of an engine are read once it has no request of this client any more: they are the
      last ones as far as this client's tokens go.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from ray_apr.core.exceptions import RolloutError
from ray_apr.core.messages import ServerStatus
from ray_apr.serve.handle import EngineHandle

logger = logging.getLogger(__name__)

LEAVE_S = 20.0
"""Longest that aborted requests may take to come back."""
_ABORT_AGAIN_S = 0.5
_STATUS_S = 10.0


class Departure:
    """Some engines leave; the client gives them no more requests.

    Args:
        engines: Those that leave, by their names.
        placed: Engine of each request of the client that is under way, by its id; the client
            changes it.
    """

    def __init__(
        self,
        engines: Mapping[str, EngineHandle] | None = None,
        placed: Mapping[str, str] | None = None,
    ) -> None:
        self.engines = engines or {}
        self._placed = {} if placed is None else placed
        self._are_empty = asyncio.Event()

    def on_end(self) -> None:
        """A request of the client has ended."""
        if self.engines and not self._requests():
            self._are_empty.set()

    def _requests(self) -> list[str]:
        return [request_id for request_id, name in self._placed.items() if name in self.engines]

    async def end_requests(self, abort: Callable[[Sequence[str]], Awaitable[Any]]) -> None:
        """Abort what runs on them, until nothing does.

        Waits for: the ends of the requests. Unblocked by: the engines; `LEAVE_S`.

        Args:
            abort: Aborts requests of these ids.
        """
        try:
            async with asyncio.timeout(LEAVE_S):
                while request_ids := self._requests():
                    self._are_empty.clear()
                    await abort(request_ids)
                    with contextlib.suppress(TimeoutError):  # one on its way to its engine escapes
                        await asyncio.wait_for(self._are_empty.wait(), _ABORT_AGAIN_S)
        except (TimeoutError, RolloutError) as error:
            logger.warning("requests of engines that leave do not come back: %r", error)

    async def last_statuses(self) -> list[ServerStatus]:
        """Status of each one that has no request any more, and answers."""
        busy = {self._placed[request_id] for request_id in self._requests()}
        calls = [
            engine.call("status", True, timeout_s=_STATUS_S)
            for name, engine in self.engines.items()
            if name not in busy
        ]
        said = await asyncio.gather(*calls, return_exceptions=True)
        return [status for status in said if isinstance(status, ServerStatus)]
