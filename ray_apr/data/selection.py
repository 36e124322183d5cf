"""Selection: which groups train at a step, and which are too old ever to train.

Invariants:
    * What is chosen is within the bound at the version that it trains, time in the queue included
      (invariant 2).
    * Groups are chosen and evicted whole (invariant 4).
    * The outcome depends on the set of groups alone, not on their order.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ray_apr.staleness import is_stale
from ray_apr.types import GroupMeta


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What `select_batch` decided; groups in neither field stay in the buffer."""

    chosen: tuple[GroupMeta, ...]
    """The batch, or empty while it is not full."""
    evicted: tuple[GroupMeta, ...]
    """Groups that are too old for this step and thus for every later one."""


def select_batch(
    groups: Iterable[GroupMeta], *, policy_version: int, max_staleness: int, batch_size: int
) -> Selection:
    """Choose the batch that trains at `policy_version`: the oldest version first, then arrival.

    Args:
        groups: Groups in the buffer, all of one size.
        policy_version: The trainer's version at the step.
        max_staleness: The bound, in optimizer steps.
        batch_size: Samples of the step.

    Returns:
        Whole groups with exactly `batch_size` samples, or none; and what is to be evicted.

    Raises:
        ValueError: If a group is newer than the trainer, or the group sizes do not fill the batch
            exactly.
    """
    fresh: list[GroupMeta] = []
    evicted: list[GroupMeta] = []
    for group in sorted(groups, key=lambda g: (g.oldest_version, g.sequence)):
        stale = is_stale(policy_version, group.oldest_version, max_staleness)
        (evicted if stale else fresh).append(group)
    chosen: list[GroupMeta] = []
    num_samples = 0
    for group in fresh:
        if num_samples >= batch_size:
            break
        chosen.append(group)
        num_samples += len(group.samples)
    if num_samples > batch_size:
        raise ValueError(
            f"groups of {sorted({len(g.samples) for g in fresh})} samples do not fill a batch of "
            f"{batch_size} exactly; groups must have one size that divides it"
        )
    full = num_samples == batch_size
    return Selection(chosen=tuple(chosen) if full else (), evicted=tuple(evicted))
