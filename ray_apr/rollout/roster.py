"""Roster: which live sample is in which state, and the order in which samples may run.

Invariants, all kept here:
    * A live sample is in exactly one state and one group; `num_in` always agrees with the states.
    * A sample can run exactly when it is WAITING, READY, or INTERRUPTED and not held back. Those
      that have begun come first, in the order asked for; then waiting ones in order of admission.
    * The version of a sample's first token is learnt once, and changes only if it starts anew.
    * `num_by_version` always counts the samples of the groups that have started.
    * A group leaves whole.

The queues are heaps with lazy deletion: an entry counts only while its sample or group is still in
the state that put it there, so that leaving costs nothing and each step O(log n).
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from ray_apr.config import ResumeOrder
from ray_apr.exceptions import RolloutError
from ray_apr.types import SampleState


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatcherCounts:
    """How many samples are in which state, and how often samples were stopped and continued."""

    waiting: int
    inflight: int
    interrupted: int
    stepping: int
    """Their environment acts."""
    ready: int
    """Their environment has answered; the next turn can start."""
    finished: int
    scored: int
    buffered: int
    """In the buffer and not trained, corrected for what is on its way (`on_buffer_counts`)."""
    interruptions_total: int
    resumptions_total: int

    @property
    def unfinished(self) -> int:
        """Samples that have not ended, wherever they are."""
        return self.waiting + self.inflight + self.interrupted + self.stepping + self.ready

    @property
    def live(self) -> int:
        """Samples that were started and are neither trained nor dropped."""
        return self.unfinished + self.finished + self.scored + self.buffered


UNFINISHED = (
    SampleState.WAITING,
    SampleState.INFLIGHT,
    SampleState.INTERRUPTED,
    SampleState.STEPPING,
    SampleState.READY,
)
"""States of samples that have not ended."""
_BEGUN = (SampleState.INTERRUPTED, SampleState.READY)


@dataclass(slots=True, eq=False)
class GroupEntry:
    """A live group."""

    group_id: str
    order: int
    """Grows with admission; unique."""
    members: list[SampleEntry] = field(default_factory=list)
    num_scored: int = 0
    oldest_version: int | None = None
    """Version of the oldest token that is known; None while there is none."""
    started_version: int | None = None
    """Version of the engines when its first member started: none of its tokens is older."""
    is_live: bool = True

    @property
    def age_version(self) -> int | None:
        """Version of the oldest token, as far as it is known; None before the start."""
        return self.started_version if self.oldest_version is None else self.oldest_version

    @property
    def is_complete(self) -> bool:
        """Whether every member has its reward."""
        return self.num_scored == len(self.members)

    @property
    def waits_for_reward(self) -> bool:
        """Whether all members have ended and a reward is missing."""
        ended = (SampleState.FINISHED, SampleState.SCORED)
        return not self.is_complete and all(s.state in ended for s in self.members)


@dataclass(slots=True, eq=False)
class SampleEntry:
    """A live sample."""

    sample_id: str
    group: GroupEntry
    order: int
    """Grows with admission; unique."""
    state: SampleState = SampleState.WAITING
    oldest_version: int | None = None
    """Version of its first token; None while it has none."""
    num_tokens: int = 0
    """Tokens that it held when its last generate call ended."""
    num_interruptions: int = 0
    is_held_back: bool = False


class Roster:
    """States and queues of live samples; it decides nothing.

    Args:
        resume_order: Which interrupted sample runs first.
    """

    def __init__(self, resume_order: ResumeOrder = "oldest_version") -> None:
        self._resume_order = resume_order
        self.num_in: Counter[SampleState] = Counter()
        """Live samples in each state."""
        self.inflight: dict[str, None] = {}
        """Ids in flight, in order of their start."""
        self.num_by_version: Counter[int] = Counter()
        """Samples of live groups that have started, by the version of the group's oldest token."""
        self.held_back: dict[str, SampleEntry] = {}
        """Interrupted samples that wait to be resumed together."""
        self._samples: dict[str, SampleEntry] = {}
        self._groups: dict[str, GroupEntry] = {}
        self._num_admitted = 0
        self._waiting: list[tuple[int, SampleEntry]] = []
        self._interrupted: list[tuple[int, int, SampleEntry]] = []
        self._num_queued = 0
        self._by_age: list[tuple[int, int, GroupEntry]] = []
        self._interruptions_total = 0
        self._resumptions_total = 0

    def __contains__(self, sample_id: str) -> bool:
        return sample_id in self._samples

    @property
    def groups(self) -> Collection[GroupEntry]:
        """All live groups, in order of admission."""
        return self._groups.values()

    @property
    def num_unfinished(self) -> int:
        """Samples that have not ended."""
        return sum(self.num_in[state] for state in UNFINISHED)

    def counts(self, *, buffered: int) -> DispatcherCounts:
        """How many samples are where; those that left for the buffer are told from outside."""
        return DispatcherCounts(
            waiting=self.num_in[SampleState.WAITING],
            inflight=self.num_in[SampleState.INFLIGHT],
            interrupted=self.num_in[SampleState.INTERRUPTED],
            stepping=self.num_in[SampleState.STEPPING],
            ready=self.num_in[SampleState.READY],
            finished=self.num_in[SampleState.FINISHED],
            scored=self.num_in[SampleState.SCORED],
            buffered=buffered,
            interruptions_total=self._interruptions_total,
            resumptions_total=self._resumptions_total,
        )

    def sample(self, sample_id: str) -> SampleEntry:
        """The entry of a live sample.

        Raises:
            RolloutError: If it is not live.
        """
        entry = self._samples.get(sample_id)
        if entry is None:
            raise RolloutError(f"sample {sample_id} is not live: it was handed over or dropped")
        return entry

    def group(self, group_id: str) -> GroupEntry:
        """The entry of a live group.

        Raises:
            RolloutError: If it is not live.
        """
        entry = self._groups.get(group_id)
        if entry is None:
            raise RolloutError(f"group {group_id} is not live: it was handed over or dropped")
        return entry

    def expect(self, sample_id: str, event: str, *states: SampleState) -> SampleEntry:
        """The entry of a sample that must be in one of `states` for `event`.

        Raises:
            RolloutError: If it is in another one, or not live.
        """
        entry = self.sample(sample_id)
        if entry.state not in states:
            wanted = " or ".join(state.value for state in states)
            raise RolloutError(
                f"{event}({sample_id!r}): the sample is {entry.state.value}, not {wanted}"
            )
        return entry

    def add_group(self, group_id: str, sample_ids: Sequence[str]) -> None:
        """Take in a group, its samples WAITING.

        Raises:
            RolloutError: If an id is not new.
        """
        known = [i for i in sample_ids if i in self._samples]
        if group_id in self._groups or known or len(set(sample_ids)) != len(sample_ids):
            raise RolloutError(
                f"group {group_id!r} with samples {list(sample_ids)!r}: every id must be new"
            )
        group = GroupEntry(group_id, self._num_admitted)
        self._groups[group_id] = group
        for sample_id in sample_ids:
            entry = SampleEntry(sample_id, group, self._num_admitted)
            self._num_admitted += 1
            group.members.append(entry)
            self._samples[sample_id] = entry
            self.num_in[SampleState.WAITING] += 1
            heapq.heappush(self._waiting, (entry.order, entry))

    def move(self, entry: SampleEntry, state: SampleState) -> None:
        """Put a sample into another state, and into the queue of that state."""
        self.num_in[entry.state] -= 1
        self.num_in[state] += 1
        if entry.state is SampleState.INFLIGHT:
            del self.inflight[entry.sample_id]
        if state is SampleState.INFLIGHT and entry.state is SampleState.INTERRUPTED:
            self._resumptions_total += 1
        entry.state = state
        if entry.is_held_back:
            self._let_go(entry)
        if state is SampleState.INFLIGHT:
            self.inflight[entry.sample_id] = None
        elif state is SampleState.WAITING:
            heapq.heappush(self._waiting, (entry.order, entry))
        elif state is SampleState.INTERRUPTED:
            self._interruptions_total += 1
            entry.num_interruptions += 1
            self._queue(entry)
        elif state is SampleState.READY:
            self._queue(entry)
        elif state is SampleState.SCORED:
            entry.group.num_scored += 1

    def note_start(self, entry: SampleEntry, policy_version: int) -> None:
        """A sample is about to start while the engines have `policy_version`."""
        if entry.group.age_version is None:
            entry.group.started_version = policy_version
            self._count_age(entry.group, +1)

    def learn_version(self, entry: SampleEntry, oldest_version: int | None) -> None:
        """Note the version of a sample's first token; None says nothing.

        Raises:
            RolloutError: If another version is known already.
        """
        if oldest_version is None:
            return
        if entry.oldest_version not in (None, oldest_version):
            raise RolloutError(
                f"sample {entry.sample_id}: oldest version {oldest_version} now, "
                f"{entry.oldest_version} before"
            )
        entry.oldest_version = oldest_version
        group = entry.group
        if group.oldest_version is None or oldest_version < group.oldest_version:
            self._set_oldest(group, oldest_version)

    def forget_tokens(self, entry: SampleEntry) -> None:
        """A sample starts anew, without the tokens it had."""
        entry.oldest_version = None
        entry.num_tokens = 0
        known = [m.oldest_version for m in entry.group.members if m.oldest_version is not None]
        self._set_oldest(entry.group, min(known, default=None))

    def _set_oldest(self, group: GroupEntry, oldest_version: int | None) -> None:
        self._count_age(group, -1)
        group.oldest_version = oldest_version
        self._count_age(group, +1)
        if oldest_version is not None:
            heapq.heappush(self._by_age, (oldest_version, group.order, group))

    def _count_age(self, group: GroupEntry, sign: int) -> None:
        version = group.age_version
        if version is not None:
            self.num_by_version[version] += sign * len(group.members)
            if not self.num_by_version[version]:
                del self.num_by_version[version]

    def hold_back(self, entry: SampleEntry) -> None:
        """Keep an interrupted sample from running until `release`."""
        entry.is_held_back = True
        self.held_back[entry.sample_id] = entry

    def release(self) -> None:
        """Let all samples that were held back run again."""
        for entry in tuple(self.held_back.values()):
            self._let_go(entry)
            self._queue(entry)

    def _let_go(self, entry: SampleEntry) -> None:
        entry.is_held_back = False
        del self.held_back[entry.sample_id]

    def _queue(self, entry: SampleEntry) -> None:
        """Put a sample that has begun into its queue; the number keeps first in, first out."""
        self._num_queued += 1
        rank = {
            "oldest_version": entry.oldest_version or 0,
            "fifo": 0,
            "most_tokens": -entry.num_tokens,
        }[self._resume_order]
        order = self._num_queued if self._resume_order == "fifo" else entry.order
        heapq.heappush(self._interrupted, (rank, order, entry))

    def pop_runnable(self) -> SampleEntry | None:
        """Take the sample that runs next out of its queue; the caller moves it to INFLIGHT."""
        while self._interrupted:
            resumable = heapq.heappop(self._interrupted)[-1]
            if resumable.state in _BEGUN and not resumable.is_held_back:
                return resumable
        while self._waiting:
            startable = heapq.heappop(self._waiting)[-1]
            if startable.state is SampleState.WAITING:
                return startable
        return None

    def oldest_group(self) -> GroupEntry | None:
        """The incomplete live group with the oldest token; None while no token is known."""
        while self._by_age:
            version, _, group = self._by_age[0]
            if group.is_live and not group.is_complete and version == group.oldest_version:
                return group
            heapq.heappop(self._by_age)
        return None

    def remove(self, group: GroupEntry, state: SampleState) -> tuple[str, ...]:
        """Let a whole group leave as `state`; returns the ids of its members."""
        group.is_live = False
        self._count_age(group, -1)
        del self._groups[group.group_id]
        for entry in group.members:
            self.move(entry, state)
            self.num_in[state] -= 1
            del self._samples[entry.sample_id]
        return tuple(entry.sample_id for entry in group.members)
