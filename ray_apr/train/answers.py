"""Answers of the other actors of a run, which the trainer waits for with a limit and a name."""

from __future__ import annotations

import logging
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from ray_apr.core.exceptions import APRError, StarvedError, one_line
from ray_apr.data.parts import Part

logger = logging.getLogger(__name__)

CALL_TIMEOUT_S = 60.0


def has_failed(ref: Any) -> bool:
    """Whether an actor's answer is there, and an error."""
    if not ray.wait([ref], timeout=0)[0]:
        return False
    try:
        ray.get(ref, timeout=CALL_TIMEOUT_S)
    except RayError:
        return True
    return False


def failure_of(buffer: Part) -> APRError | None:
    """Why the run has failed, as far as its buffer says so."""
    try:
        failure: APRError | None = answer_of(buffer.call("failure"), "buffer", CALL_TIMEOUT_S)
    except (APRError, RayError) as error:
        logger.debug("the buffer does not say whether the run has failed: %s", one_line(error))
        return None
    return failure


def captured_of(asked: Any) -> tuple[Any, Any]:
    """What the rollout side saw, and the table of its samples."""
    taken = answer_of(asked, "rollout worker, for a checkpoint", CALL_TIMEOUT_S)
    return taken, answer_of(taken.samples[0], "samples of a checkpoint", CALL_TIMEOUT_S)


def answer_of(ref: Any, whom: str, timeout_s: float) -> Any:
    """Wait for an actor's answer.

    Raises:
        StarvedError: If it does not come within `timeout_s`.
    """
    try:
        return ray.get(ref, timeout=timeout_s)
    except GetTimeoutError as error:
        raise StarvedError(f"the trainer waited {timeout_s:g} s for the {whom}") from error
