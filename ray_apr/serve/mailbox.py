"""The server's end of the exchange (`serve.exchange`): outcomes of calls, until they are asked for.

Invariants, kept by `Mailboxes`:
    * A mailbox has one reader, the newest: what it hands to an older one might reach nobody.
    * Outcomes of a client that is gone are not kept.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from ray_apr.core.exceptions import APRError
from ray_apr.core.messages import Generation

Outcome = Generation | APRError

_TOGETHER_S = 0.003
"""What ends within this time of another request travels with it."""
_LINGER_S = 0.2
"""A stream ends when it has owed nothing for so long."""
STREAM_S = 60.0
"""It also ends when it is so old; a client that lives asks for the next one."""
_ABANDONED_S = 900.0
"""A client that has not asked for so long is gone."""


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

        Waits for: the next outcome. Unblocked by: `STREAM_S`, or a newer stream.
        """
        box = self._box(client_id)
        box.asked_at = began = time.monotonic()
        box.reader = reader = object()
        box.arrived.set()  # for an older reader, which ends then
        while (left_s := began + STREAM_S - time.monotonic()) > 0:
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
