"""Which of the scored groups are trained."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ray_apr.core.exceptions import RolloutError
from ray_apr.core.sample import Sample
from ray_apr.core.user import GroupFilter


def is_filtered(group: Sequence[Sample], keeps: GroupFilter | None, *, zero_variance: bool) -> bool:
    """Whether a group is dropped, and another prompt takes its place.

    Args:
        group: Its samples, with their rewards.
        keeps: The user's filter; None keeps all.
        zero_variance: Whether groups are dropped whose rewards are all equal, so that all their
            advantages are zero.

    Raises:
        RolloutError: If the user's filter raises, or says neither yes nor no, as one that lacks its
            `return` or is async.
    """
    if zero_variance and len({sample.reward for sample in group}) == 1:
        return True
    if keeps is None:
        return False
    name = group[0].group_id
    try:
        said = keeps(group)
    except Exception as error:
        raise RolloutError(f"the group filter raised for group {name}: {error!r}") from error
    if not isinstance(said, (bool, int, float, np.generic)):
        raise RolloutError(
            f"the group filter returned {said!r} for group {name}, not True or False"
        )
    return not said
