"""One engine, as clients reach it: a Serve deployment of one replica.

Serve's own calls wait until a deployment that has lost its replica has another one. Those of an
`EngineHandle` do not: they reach the replica that runs, or raise.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from ray import serve
from ray.exceptions import ActorUnavailableError, RayActorError, RayTaskError
from ray.serve.exceptions import DeploymentUnavailableError

from ray_apr.core.exceptions import EngineDiedError


def engine_names(num_engines: int) -> tuple[str, ...]:
    """Names of the deployments of an application's engines."""
    return tuple(f"engine-{i}" for i in range(num_engines))


def num_of_engines(app_name: str) -> int:
    """Engines that Serve has for an application now; 0 where there is no such application."""
    app = serve.status().applications.get(app_name)
    deployed = () if app is None else app.deployments
    return sum(name in deployed for name in engine_names(len(deployed)))


class EngineHandle:
    """The line to one engine, whichever replica has it at the time.

    Args:
        app_name: Name of the Serve application.
        name: Of the engine's deployment.
    """

    def __init__(self, app_name: str, name: str) -> None:
        self._handle: Any = serve.get_deployment_handle(name, app_name)

    async def call(self, verb: str, *args: Any, timeout_s: float | None) -> Any:
        """Call the replica that runs.

        Raises:
            DeploymentUnavailableError: If none does.
            TimeoutError: If there is no answer in time.
        """
        (answer, *_) = await self._handle.broadcast(verb, *args).results_async(timeout_s=timeout_s)
        return answer

    def stream(self, verb: str, *args: Any) -> AsyncIterator[Any]:
        """What a verb yields; its first item may wait for another replica."""
        pieces: AsyncIterator[Any] = getattr(self._handle.options(stream=True), verb).remote(*args)
        return pieces

    def tell(self, verb: str, *args: Any) -> None:
        """Call without an answer."""
        getattr(self._handle, verb).remote(*args)


def is_none(result: object) -> bool:
    """Whether an answer says that no replica is there."""
    return isinstance(result, DeploymentUnavailableError)


def is_death(result: object) -> bool:
    """Whether an answer says that there is no replica, or that it or its engine is dead."""
    cause = result.cause if isinstance(result, RayTaskError) else result
    if isinstance(cause, ActorUnavailableError):  # of a connection; it may be back in a moment
        return False
    return is_none(cause) or isinstance(cause, RayActorError | EngineDiedError)
