"""Why a run failed: the cause in one line, and all that is known of it in a file.

Ray wraps an error once for each process that it came through, and Ray Train prints all of it.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator
from pathlib import Path

from ray.exceptions import (
    ObjectStoreFullError,
    OutOfDiskError,
    RayActorError,
    RayError,
    RayTaskError,
)

from ray_apr.core.exceptions import APRError, FolderTakenError, TrainError, one_line
from ray_apr.data.store import of_full_store
from ray_apr.run.folder import put_text

logger = logging.getLogger(__name__)

_DEATH = "The actor is dead because"
"""How Ray begins the line that says why an actor died."""
_NOT_MADE = "The actor died because of an error raised in its creation task"
"""How it begins the text, a whole traceback, of an actor that never was."""


def cause_of(error: BaseException) -> APRError:
    """The error of ours behind one that Ray raised; without any, the death of a process, or what
    the first train worker raised."""
    leaves = list(_leaves(error))
    ours = next((leaf for leaf in leaves if isinstance(leaf, APRError)), None)
    if ours is not None:
        return ours
    deaths = (leaf for leaf in leaves if isinstance(leaf, RayActorError))
    first = next(deaths, leaves[0])  # the others only lose their connections to what has died
    if isinstance(first, (ObjectStoreFullError, OutOfDiskError)):
        return of_full_store(first)
    if isinstance(first, RayActorError):
        return TrainError(f"training failed: a process of it died: {death_of(first)}")
    return TrainError(f"training failed: {type(first).__name__}: {one_line(first)}")


def death_of(error: RayError) -> str:
    """Why an actor died, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if lines and lines[0].startswith(_NOT_MADE):
        return f"{_NOT_MADE}: {lines[-1]}"
    return next((line for line in lines if line.startswith(_DEATH)), one_line(error))


def of_servers(error: Exception) -> APRError:
    """An error of the servers' start that is none of ours, as one of ours."""
    return APRError(f"servers: {error!r}").with_traceback(error.__traceback__)


def write_error_log(file: Path, error: BaseException, cause: BaseException) -> bool:
    """Write the cause, and below it the tracebacks of all processes; whether that could be done,
    which it may not be in a folder that another driver has."""
    if isinstance(cause, FolderTakenError):
        return False
    parts = [f"{type(cause).__name__}: {one_line(cause)}\n", *_tracebacks(error)]
    if cause.__traceback__ is not None and cause is not error:
        parts.append("".join(traceback.format_exception(cause)))
    try:
        put_text(file, "\n".join(parts))
    except OSError as full:
        logger.error("%s cannot be written: %s", file, one_line(full))
        return False
    return True


def _tracebacks(error: BaseException) -> Iterator[str]:
    yield "".join(traceback.format_exception(error))
    for rank, failure in _worker_failures(error).items():
        yield f"train worker {rank}:\n{failure}\n"


def _leaves(error: BaseException) -> Iterator[BaseException]:
    """What was raised, of each train worker in order of ranks, without what Ray put around it."""
    failures = _worker_failures(error)
    if failures:
        for _, failure in sorted(failures.items()):
            yield from _leaves(failure)
        return
    # of Ray Train: its controller, a train worker that died, the code of one
    for name in ("controller_failure", "health_check_failure", "_base_exc"):
        inner = getattr(error, name, None)
        if isinstance(inner, BaseException):
            yield from _leaves(inner)
            return
    if isinstance(error, RayTaskError) and isinstance(error.cause, BaseException):
        yield from _leaves(error.cause)
        return
    if not isinstance(error, APRError) and isinstance(error.__cause__, BaseException):
        yield from _leaves(error.__cause__)
        return
    yield error


def _worker_failures(error: BaseException) -> dict[int, BaseException]:
    failures = getattr(error, "worker_failures", None)
    return failures if isinstance(failures, dict) else {}
