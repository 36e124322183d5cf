"""The line to an actor that bears to be told twice: its calls outlive a broken connection."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from ray.exceptions import ActorUnavailableError

from ray_apr.core.exceptions import one_line
from ray_apr.data.parts import RESTART_LIMIT_S

logger = logging.getLogger(__name__)

_PAUSE_S = 0.5


class Line:
    """Calls an actor as its handle does, and again while it cannot be reached.

    Args:
        actor: Its handle.

    Attributes:
        actor: The same, for calls that are made once.
    """

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    def __getattr__(self, verb: str) -> _Verb:
        """One of its methods."""
        return _Verb(getattr(self.actor, verb))


class _Verb:
    def __init__(self, method: Any) -> None:
        self._method = method

    def remote(self, *args: Any, **kwargs: Any) -> Awaitable[Any]:
        """Call it now; to be awaited."""
        call = functools.partial(self._method.remote, *args, **kwargs)
        return _outcome(call, call())


async def _outcome(call: Callable[[], Any], answer: Any) -> Any:
    """The answer of a call, or of the same call made again.

    Waits for: the answer. Unblocked by: that, the actor's death, or `RESTART_LIMIT_S` in which it
    cannot be reached.
    """
    deadline: float | None = None
    while True:
        try:
            return await answer
        except ActorUnavailableError as error:
            now = time.monotonic()
            deadline = deadline or now + RESTART_LIMIT_S
            if now > deadline:
                raise
            logger.warning("a call is made again: %s", one_line(error))
        await asyncio.sleep(_PAUSE_S)
        answer = call()
