"""Calls of an actor that begins again, under the next name, if it dies: worker and buffer of a run.

The driver starts the next one (`run.side`). Who has a `Part` follows it there, and makes its call
once more; so whoever answers must bear to be asked twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import (
    ActorUnavailableError,
    GetTimeoutError,
    OutOfMemoryError,
    RayActorError,
    WorkerCrashedError,
)

from ray_apr.core.exceptions import APRError, StarvedError, TrainError, one_line

RESTART_LIMIT_S = 180.0
"""Longest wait for the next one."""
DEATHS = (RayActorError, OutOfMemoryError, WorkerCrashedError)
"""What Ray raises for a call of an actor that is dead, whatever killed it."""
_PAUSE_S = 0.5
_MOST_AT_ONCE = 5
"""Of several that have died one after the other since the last call, so many are looked for."""


def nth_name(name: str, generation: int) -> str:
    """Name of an actor of a kind (0: the first one), which Ray's tables show."""
    return f"{name}-{generation}" if generation else name


@dataclass(frozen=True, slots=True)
class PartName:
    """Name of an actor and of those that follow it.

    Args:
        name: Of the first one, in Ray's tables.
        namespace: Of Ray.
    """

    name: str
    namespace: str

    def of(self, generation: int) -> str:
        """Name of the first one (0), or of one that follows."""
        return nth_name(self.name, generation)


class Part:
    """The one that lives.

    Args:
        name: Its name.
        whom: What an error calls it.
        failure: Says why the run has failed, so that no next one comes; None while it has not.
    """

    def __init__(
        self, name: PartName, whom: str, failure: Callable[[], APRError | None] = lambda: None
    ) -> None:
        self._name = name
        self._whom = whom
        self._failure = failure
        self._generation = 0
        self._actor: Any = None

    def call(self, verb: str, *args: Any, **kwargs: Any) -> Any:
        """Call the one that was here last; returns Ray's reference of the answer."""
        if self._actor is None:
            self._actor = self._find(self._generation) or self._next("it is dead")
        return getattr(self._actor, verb).remote(*args, **kwargs)

    def ask(self, verb: str, *args: Any, limit_s: float, what: str = "", **kwargs: Any) -> Any:
        """Call it, and if it dies the next one, and wait for the answer.

        Waits for: the answer. Unblocked by: `limit_s`; `RESTART_LIMIT_S` for the next one.

        Args:
            verb: Its method.
            args: Of the call.
            limit_s: Longest wait for an answer.
            what: What it was asked for, for the error.
            kwargs: Of the call.

        Raises:
            StarvedError: If the answer does not come in time.
            TrainError: If no next one comes.
            APRError: What it answers, or what the run has failed of.
        """
        while True:
            try:
                return ray.get(self.call(verb, *args, **kwargs), timeout=limit_s)
            except GetTimeoutError as error:
                raise StarvedError(f"waited {limit_s:g} s for the {self._whom}{what}") from error
            except DEATHS as error:
                self.follow(error)

    def follow(self, error: BaseException) -> None:
        """Wait for the next one, after a call of the last one raised a death; where only the
        connection is broken, a moment.

        Raises:
            TrainError: If no next one comes.
            APRError: What the run has failed of.
        """
        if isinstance(error, ActorUnavailableError):
            time.sleep(_PAUSE_S)
            return
        self._actor = self._next(one_line(error))

    def _next(self, reason: str) -> Any:
        """The actor that follows the one that has died.

        Waits for: the driver, which starts it. Unblocked by: the next one, `failure`, or
        `RESTART_LIMIT_S`.
        """
        deadline = time.monotonic() + RESTART_LIMIT_S
        while time.monotonic() < deadline:
            for generation in range(self._generation + 1, self._generation + 1 + _MOST_AT_ONCE):
                actor = self._find(generation)
                if actor is not None:
                    self._generation = generation
                    return actor
            failure = self._failure()
            if failure is not None:
                raise failure
            time.sleep(_PAUSE_S)
        raise TrainError(
            f"the {self._whom} is dead, and no other one came within {RESTART_LIMIT_S:g} s: "
            f"{reason}"
        )

    def _find(self, generation: int) -> Any:
        try:
            return ray.get_actor(self._name.of(generation), namespace=self._name.namespace)
        except ValueError:  # there is none of this name
            return None
