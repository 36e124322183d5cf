"""A run that fails goes on by itself, with its last checkpoint, as often as it may.

Whatever part has died, all parts are taken away and made anew: what they have in common, weights,
samples and counters of one moment, is the checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from ray.exceptions import RayError

from ray_apr.core.exceptions import (
    APRError,
    ConfigError,
    FolderTakenError,
    LedgerError,
    PrivateNameError,
    RanksChange,
    WeightMismatchError,
    one_line,
)

_Result = TypeVar("_Result")

_FOR_GOOD = (ConfigError, FolderTakenError, LedgerError, PrivateNameError, WeightMismatchError)
"""Errors that would come again, or that say that figures cannot be trusted."""
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0


def run_with_restarts(
    attempt: Callable[[], _Result],
    *,
    max_failures: int,
    num_steps: int,
    last_step: Callable[[], int],
    show: Callable[[str], None],
    sleep: Callable[[float], None] = time.sleep,
) -> _Result:
    """Run until an attempt ends well.

    The pause before the next one doubles from a second to a minute while no checkpoint is added. A
    failure after the last step, or while the last checkpoint cannot be read, ends the run.

    A change of the number of train workers is no failure, and is not counted.

    Args:
        attempt: Runs from where the run folder stands.
        max_failures: Attempts that may fail beside the last; -1: any number.
        num_steps: Of the whole run.
        last_step: Steps that the next attempt does not train again.
        show: Takes a line for a person.
        sleep: Waits so many seconds.

    Raises:
        APRError: What the last attempt failed of.
    """
    num_failures, pause, reached = 0, _FIRST_PAUSE_S, -1
    while True:
        try:
            return attempt()
        except (APRError, RayError) as error:
            is_failure = not isinstance(error, RanksChange)
            if (is_failure and num_failures == max_failures) or isinstance(error, _FOR_GOOD):
                raise
            num_failures += is_failure
            before, reached = reached, _ask(last_step, error)
            if reached >= num_steps:
                raise
            pause = _FIRST_PAUSE_S if reached > before else min(2 * pause, _LONGEST_PAUSE_S)
            most = "any number" if max_failures < 0 else max_failures
            what, of = (
                ("failed", f" (restart {num_failures} of {most})")
                if is_failure
                else ("train workers change", "")
            )
            show(f"{what}: {one_line(error)}; goes on with its last checkpoint in {pause:g} s{of}")
            sleep(pause)


def _ask(last_step: Callable[[], int], error: Exception) -> int:
    """The last checkpoint's step; if that is not known, what failed is what the run failed of."""
    try:
        return last_step()
    except APRError as unknown:
        error.add_note(f"the run does not go on: {one_line(unknown)}")
        raise error from unknown
