"""Calls of an actor that begins again, under the next name, if it dies: worker and buffer of a run.

The driver starts the next one (`run.side`). Who has a `Part` follows it there, and makes its call
once more; so whoever answers must bear to be asked twice.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import ray
from ray.exceptions import (
    ActorUnavailableError,
    GetTimeoutError,
    ObjectLostError,
    OutOfMemoryError,
    OwnerDiedError,
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


class Living(NamedTuple):
    """One of a part's actors, which is not known to be dead."""

    generation: int
    """How many came before it."""
    actor: Any
    """Its handle."""

    def call(self, verb: str, *args: Any, **kwargs: Any) -> Any:
        """Call it, and no other one; returns Ray's reference of the answer."""
        return getattr(self.actor, verb).remote(*args, **kwargs)


class Part:
    """The one that lives. Several threads may call it: of those that hear of a death one looks for
    the next actor, and the others get that.

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
        self._living: Living | None = None
        self._following = threading.Lock()

    def living(self) -> Living:
        """The one that was here last, for calls that belong together.

        Waits for: who looks for it. Unblocked by: its end, at the latest after `RESTART_LIMIT_S`.
        """
        if self._living is None:
            with self._following:
                self._living = self._living or self._found(0, 1) or self._next(0, "it is dead")
        return self._living

    def call(self, verb: str, *args: Any, **kwargs: Any) -> Any:
        """Call the one that was here last; returns Ray's reference of the answer."""
        return self.living().call(verb, *args, **kwargs)

    def ask(self, verb: str, *args: Any, limit_s: float, what: str = "", **kwargs: Any) -> Any:
        """Call it, and if it dies the next one, and wait for the answer.

        Waits for: the answer. Unblocked by: `limit_s`; `RESTART_LIMIT_S` for the next one, and for
        one that cannot be reached.

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
        reached_at = time.monotonic()
        while True:
            asked = self.living()
            try:
                return ray.get(asked.call(verb, *args, **kwargs), timeout=limit_s)
            except GetTimeoutError as error:
                raise StarvedError(f"waited {limit_s:g} s for the {self._whom}{what}") from error
            except ActorUnavailableError as error:
                if time.monotonic() - reached_at > limit_s + RESTART_LIMIT_S:
                    raise StarvedError(
                        f"the {self._whom} was not reached within {limit_s + RESTART_LIMIT_S:g} s"
                        f"{what}: {one_line(error)}"
                    ) from error
                self.follow(error, asked)
            except DEATHS as error:
                self.follow(error, asked)
                reached_at = time.monotonic()

    def follow(self, error: BaseException, asked: Living) -> None:
        """Wait for the next one, after a call raised a death; where it may live, as a connection is
        broken or an object is lost that it does not own, a moment.

        Waits for: who looks for the next one. Unblocked by: its end, at the latest after
        `RESTART_LIMIT_S`.

        Args:
            error: What the call raised.
            asked: Who was called.

        Raises:
            TrainError: If no next one comes.
            APRError: What the run has failed of.
        """
        is_lost = isinstance(error, ObjectLostError) and not isinstance(error, OwnerDiedError)
        if is_lost or isinstance(error, ActorUnavailableError):
            time.sleep(_PAUSE_S)
            return
        with self._following:
            if self._living is asked:  # nobody has looked for the next one yet
                self._living = self._next(asked.generation + 1, one_line(error))

    def pass_over(self, dead: Living) -> None:
        """Take the one that follows a dead one if it is there already."""
        following = self._found(dead.generation + 1, _MOST_AT_ONCE)
        if following is not None and self._living is dead:
            self._living = following

    def _next(self, first: int, reason: str) -> Living:
        """The actor that follows the one that has died.

        Waits for: the driver, which starts it. Unblocked by: the next one, `failure`, or
        `RESTART_LIMIT_S`.
        """
        deadline = time.monotonic() + RESTART_LIMIT_S
        while time.monotonic() < deadline:
            following = self._found(first, _MOST_AT_ONCE)
            if following is not None:
                return following
            failure = self._failure()
            if failure is not None:
                raise failure
            time.sleep(_PAUSE_S)
        raise TrainError(
            f"the {self._whom} is dead, and no other one came within {RESTART_LIMIT_S:g} s: "
            f"{reason}"
        )

    def _found(self, first: int, number: int) -> Living | None:
        """The first one that lives of so many generations; None if there is none."""
        for generation in range(first, first + number):
            try:
                name = self._name.of(generation)
                actor = ray.get_actor(name, namespace=self._name.namespace)
            except ValueError:  # there is none of this name
                continue
            return Living(generation, actor)
        return None
