"""Selection: which groups train at a step, and which are too old ever to train.

Invariants:
    * What is chosen has a token within the bound at the version that it trains; with
      ``on_stale="evict"`` and ``"wait"`` all of its tokens are. Time in the queue counts
      (invariant 2).
    * Groups are chosen and evicted whole (invariant 4).
    * The outcome depends on the set of groups alone, not on the order in which they came, beyond
      what their sequence numbers say.

Pure: the buffer actor and the simulator run this same class. Adding a group and choosing one cost
O(log n) in the number of groups.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ray_apr.config import OnStale
from ray_apr.core.group import GroupMeta
from ray_apr.core.staleness import leaves_none_behind, oldest_trainable


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What `Shelf.select` decided; groups in neither field stay on the shelf."""

    chosen: tuple[GroupMeta, ...]
    """The batch, or empty while it is not full."""
    evicted: tuple[GroupMeta, ...]
    """Groups that are too old for this step and thus for every later one."""


class Shelf:
    """Scored groups that wait for the trainer: the oldest token leaves first, then arrival.

    Args:
        batch_size: Samples of one step.
        max_staleness: The bound, in policy versions.
        on_stale: What becomes of groups whose oldest token is beyond the bound.
    """

    def __init__(self, *, batch_size: int, max_staleness: int, on_stale: OnStale) -> None:
        self._batch_size = batch_size
        self._max_staleness = max_staleness
        self._on_stale = on_stale
        self._heap: list[tuple[int, int, GroupMeta]] = []
        self._by_version: Counter[int] = Counter()
        self._num_samples = 0

    def __iter__(self) -> Iterator[GroupMeta]:
        """Groups on the shelf, in no particular order."""
        return (group for _, _, group in self._heap)

    @property
    def num_samples(self) -> int:
        """Samples on the shelf."""
        return self._num_samples

    def add(self, group: GroupMeta) -> None:
        """Put a group on the shelf."""
        heapq.heappush(self._heap, (group.oldest_version, group.sequence, group))
        self._count(group, +1)

    def select(
        self, policy_version: int, unfinished_by_version: Mapping[int, int] | None = None
    ) -> Selection:
        """Take the batch that trains at `policy_version` off the shelf, and what is too old.

        Args:
            policy_version: The trainer's version at the step.
            unfinished_by_version: Samples that still generate or wait for their reward, by the
                version of their oldest token; ``on_stale="wait"`` waits for those that are due.

        Returns:
            Whole groups with exactly ``batch_size`` samples, or none; and what is evicted.

        Raises:
            ValueError: If a group is newer than the trainer, or the group sizes do not fill the
                batch exactly.
        """
        evicted = self._evict(policy_version)
        if self._num_samples < self._batch_size or self._must_wait(
            policy_version, unfinished_by_version or {}
        ):
            return Selection(chosen=(), evicted=evicted)
        chosen: list[GroupMeta] = []
        num_samples = 0
        while num_samples < self._batch_size and self._heap:
            group = self._pop()
            if group.newest_version < oldest_trainable(policy_version, self._max_staleness):
                evicted += (group,)
                continue
            if group.newest_version > policy_version:
                raise ValueError(
                    f"group {group.group_id} of version {group.newest_version} is newer than the "
                    f"trainer at {policy_version}"
                )
            chosen.append(group)
            num_samples += len(group.samples)
        if num_samples > self._batch_size:
            raise ValueError(
                f"groups of {sorted({len(g.samples) for g in chosen})} samples do not fill a batch "
                f"of {self._batch_size} exactly; groups must have one size that divides it"
            )
        if num_samples < self._batch_size:
            for group in chosen:
                self.add(group)
            chosen = []
        return Selection(chosen=tuple(chosen), evicted=evicted)

    def _evict(self, policy_version: int) -> tuple[GroupMeta, ...]:
        """Take groups off whose oldest token is too old, unless it can be masked."""
        evicted: list[GroupMeta] = []
        oldest = oldest_trainable(policy_version, self._max_staleness)
        while self._on_stale != "mask" and self._heap and self._heap[0][0] < oldest:
            evicted.append(self._pop())
        return tuple(evicted)

    def _must_wait(self, policy_version: int, unfinished_by_version: Mapping[int, int]) -> bool:
        """Whether a batch of what is here would let an older, unfinished group expire."""
        if self._on_stale != "wait":
            return False
        return not leaves_none_behind(
            self._by_version,
            unfinished_by_version,
            policy_version=policy_version,
            max_staleness=self._max_staleness,
            batch_size=self._batch_size,
        )

    def _pop(self) -> GroupMeta:
        group = heapq.heappop(self._heap)[-1]
        self._count(group, -1)
        return group

    def _count(self, group: GroupMeta, sign: int) -> None:
        self._num_samples += sign * len(group.samples)
        if self._on_stale == "wait":
            self._by_version[group.oldest_version] += sign * len(group.samples)
            if not self._by_version[group.oldest_version]:
                del self._by_version[group.oldest_version]
