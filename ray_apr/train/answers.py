"""Answers of the other actors of a run, which the trainer waits for with a limit and a name."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import GetTimeoutError, ObjectLostError, RayError

from ray_apr.core.exceptions import APRError, StarvedError, one_line
from ray_apr.data.parts import DEATHS, Living, Part

if TYPE_CHECKING:
    from ray_apr.core.messages import WeightGroupState

logger = logging.getLogger(__name__)

CALL_TIMEOUT_S = 60.0
_CAPTURES = 10
"""Times that a look at the rollout side is tried, where one worker after the other dies."""


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
    living = None
    try:
        living = buffer.living()
        failure: APRError | None = answer_of(living.call("failure"), "buffer", CALL_TIMEOUT_S)
    except (APRError, RayError) as error:
        logger.debug("the buffer does not say whether the run has failed: %s", one_line(error))
        if living is not None and isinstance(error, DEATHS):
            buffer.pass_over(living)  # the next one is asked the next time
        return None
    return failure


def until_engines_run(workers: Part, buffer: Part, limit_s: float) -> None:
    """Return once the run's engines have started.

    Waits for: their start. Unblocked by: that, a failure of the run, or `limit_s`.

    Args:
        workers: The rollout worker, whichever lives.
        buffer: Knows whether the run has failed.
        limit_s: Longest wait.

    Raises:
        StarvedError: If they have not started within `limit_s`.
        APRError: What the run has failed of.
    """
    deadline = time.monotonic() + limit_s
    what = ", which is to say whether the engines run"
    while not workers.ask("engines_run", limit_s=CALL_TIMEOUT_S, what=what):
        failure = failure_of(buffer)
        if failure is not None:
            raise failure
        if time.monotonic() > deadline:
            raise StarvedError(f"the trainer waited {limit_s:g} s for the engines to start")


def group_state_of(workers: Part, buffer: Part, limit_s: float) -> WeightGroupState:
    """Who is there to get weights, once anybody is.

    Waits for: engines, where none runs, and a rollout worker that takes them over. Unblocked by:
    these; the rollout worker and the driver, which have limits; a failure of the run.

    Args:
        workers: The rollout worker, whichever lives.
        buffer: Knows whether the run has failed.
        limit_s: Longest wait for an answer.
    """
    what = ", whose servers are to say who is there"
    while True:
        state: WeightGroupState | None = workers.ask(
            "weight_group_state", limit_s=limit_s, what=what
        )
        if state is not None:
            return state
        failure = failure_of(buffer)
        if failure is not None:
            raise failure


def captured_of(workers: Part, worker: Living, asked: Any) -> tuple[Any, Any]:
    """What the rollout side saw, and the table of its samples: of a worker, or of one that follows
    it, which stands there, too, as no step has begun.

    Args:
        workers: The rollout worker, whichever lives.
        worker: The one that was asked; the samples are in its process.
        asked: Its answer.
    """
    for _ in range(_CAPTURES - 1):
        try:
            return _captured(asked)
        except (*DEATHS, ObjectLostError) as error:
            workers.follow(error, worker)
            worker = workers.living()
            asked = worker.call("capture")
    return _captured(asked)


def _captured(asked: Any) -> tuple[Any, Any]:
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
