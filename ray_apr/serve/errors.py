"""Errors of Ray and Serve, as ours: what a call of a rollout server may end with."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable
from typing import Any

from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError
from ray.serve.exceptions import DeploymentUnavailableError, RayServeException

from ray_apr.core.exceptions import (
    APRError,
    EngineDiedError,
    EngineUnavailableError,
    NoEngineError,
    RolloutError,
    one_line,
)
from ray_apr.serve.handle import is_death


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
        f"{what}: no rollout server runs: they start, or their logs say why they ended"
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
    said = f"{what}: {without_pages(cause)}"
    if isinstance(cause, RayActorError) and not isinstance(cause, ActorUnavailableError):
        return EngineDiedError(said)
    return EngineUnavailableError(said)


def without_pages(error: BaseException) -> str:
    """An error without the pages that Ray adds to it."""
    said = one_line(error)
    return said if isinstance(error, APRError) else f"{type(error).__name__}: {said}"


def of_living(results: Iterable[Any], verb: str) -> list[Any]:
    """Answers of the replicas that live.

    Raises:
        APRError: What one of them raised, or that there is none.
    """
    living = [result for result in results if not is_death(result)]
    errors = [result for result in living if isinstance(result, BaseException)]
    if errors:
        raise translated(errors[0], f"{verb} on {len(errors)} of {len(living)} replicas")
    if not living:
        raise none_runs(verb)
    return living
