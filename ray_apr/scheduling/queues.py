"""Live samples and groups: their states, their tokens in the ledger, and the order they may run in.

Invariants, all kept here:
    * What happens to a sample happens to its state, to its queue and to the ledger at once.
    * A sample can run exactly when it is WAITING, READY, or INTERRUPTED and not held back. Those
      that have begun come first, in the resume order; then waiting ones in order of admission.
    * `inflight` holds exactly the samples of live groups that are in flight.
    * `num_by_version` always counts the samples of the groups that have started.
    * A group leaves whole.
    * What an engine died under runs as `suspects` allows, before all others.

The queues are heaps with lazy deletion: an entry counts only while its sample or group is still in
the state that put it there, so that leaving costs nothing and each step O(log n). The one by age is
read only where stale groups are evicted, so it is made anew when most of it has left.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any

from ray_apr.core.exceptions import RolloutError
from ray_apr.core.ledger import TokenLedger
from ray_apr.core.sample import Prompt, Sample, SampleState
from ray_apr.scheduling.live import (
    UNFINISHED,
    Counts,
    Event,
    LiveGroup,
    LiveSample,
    resting_state,
    transition,
)
from ray_apr.scheduling.suspects import Suspects

_S = SampleState
_RUNNABLE = (_S.WAITING, _S.INTERRUPTED, _S.READY)
_FEW = 64
"""Entries of the queue by age that are never too many."""


class LiveSamples:
    """Records and queues of live samples; it decides nothing.

    Args:
        rank: The resume order.
    """

    def __init__(self, rank: Callable[[LiveSample], Any]) -> None:
        self._rank = rank
        self.ledger = TokenLedger()
        self.num_in: Counter[SampleState] = Counter()
        """Live samples in each state."""
        self.num_unfinished = 0
        """Samples that have not ended."""
        self.inflight: dict[str, LiveSample] = {}
        """In order of their start."""
        self.num_by_version: Counter[int] = Counter()
        """Samples of live groups that have started, by the version of the group's oldest token."""
        self.held_back: dict[str, LiveSample] = {}
        """Interrupted samples that wait to be resumed together."""
        self.suspects = Suspects()
        self._groups: dict[str, LiveGroup] = {}
        self._num_admitted = 0
        self._waiting: list[tuple[int, LiveSample]] = []
        self._begun: list[tuple[Any, int, LiveSample]] = []
        self._num_queued = 0
        self._by_age: list[tuple[int, int, LiveGroup]] = []
        self._interruptions_total = 0
        self._resumptions_total = 0

    @property
    def groups(self) -> Collection[LiveGroup]:
        """All live groups, in order of admission."""
        return self._groups.values()

    @property
    def num_ended(self) -> int:
        """Live samples that have ended."""
        return self.num_in[_S.FINISHED] + self.num_in[_S.SCORED]

    def counts(self, *, buffered: int) -> Counts:
        """How many samples are where; those that left for the buffer are told from outside."""
        return Counts(
            **{state.value: self.num_in[state] for state in (*UNFINISHED, _S.FINISHED)},
            scored=self.num_in[_S.SCORED],
            buffered=buffered,
            interruptions_total=self._interruptions_total,
            resumptions_total=self._resumptions_total,
        )

    def add_group(self, prompt: Prompt, samples: Sequence[Sample]) -> LiveGroup:
        """Take in a group: new samples are WAITING, those of a checkpoint have their tokens.

        Raises:
            RolloutError: If a group of its id is live.
        """
        group_id = samples[0].group_id
        if group_id in self._groups:
            raise RolloutError(f"group {group_id!r} is live already: every id must be new")
        first = self._num_admitted
        self._num_admitted += len(samples)
        self._groups[group_id] = group = LiveGroup(group_id, prompt, first)
        group.members += [LiveSample(s, group, order) for order, s in enumerate(samples, first)]
        for live in group.members:
            self._take_in(live)
        return group

    def _take_in(self, live: LiveSample) -> None:
        live.state, live.num_stops = resting_state(live.sample), live.sample.num_interruptions
        is_unfinished = live.state in UNFINISHED
        self.num_in[live.state] += 1
        self.num_unfinished += is_unfinished
        self.ledger.take_over(
            live.sample.num_generated, "interrupted" if is_unfinished else "pending"
        )
        self.learn_version(live)
        self._place(live)

    def move(self, live: LiveSample, event: Event) -> None:
        """Let an event happen to a sample: its state, its queue, and where its tokens are.

        Raises:
            RolloutError: If the sample is in another state than the event needs.
        """
        row = transition(live, event)
        before, state, name = live.state, row.target, live.sample.sample_id
        was_unfinished = before in UNFINISHED
        self.num_in[before] -= 1
        self.num_in[state] += 1
        if was_unfinished and state not in UNFINISHED:
            self.num_unfinished -= 1
        if row.tokens is not None:
            self._move_tokens(live, was_unfinished, row.tokens)
        if before is _S.INFLIGHT:
            del self.inflight[name]
            self.suspects.left(live)
        if state is _S.INFLIGHT and before is _S.INTERRUPTED:
            self._resumptions_total += 1
        live.state = state
        self.held_back.pop(name, None)
        if state is _S.INTERRUPTED:
            self._interruptions_total += 1
            live.num_stops += 1
        self._place(live)

    def _place(self, live: LiveSample) -> None:
        """Put a sample where those of its state are."""
        if live.state is _S.INFLIGHT:
            self.inflight[live.sample_id] = live
            self.suspects.started(live)
        elif live.sample.num_deaths and live.state in _RUNNABLE:
            self.suspects.queue(live)
        elif live.state is _S.WAITING:
            heapq.heappush(self._waiting, (live.order, live))
        elif live.state in (_S.INTERRUPTED, _S.READY):
            self._queue(live)
        elif live.state is _S.SCORED:
            live.group.num_scored += 1

    def _move_tokens(self, live: LiveSample, was_unfinished: bool, target: Any) -> None:
        """Move all tokens of a sample in the ledger; those of unfinished ones are interrupted."""
        num_tokens = live.sample.num_generated
        if target == "handed_over":
            self.ledger.hand_over(num_tokens)
        elif target == "pending":
            self.ledger.move(num_tokens, "interrupted", "pending")
        else:
            self.ledger.discard(num_tokens, "interrupted" if was_unfinished else "pending", target)

    def start(self, live: LiveSample, policy_version: int) -> None:
        """A sample starts or goes on while the engines have `policy_version`."""
        if live.group.age_version is None:
            live.group.started_version = policy_version
            self._count_age(live.group, +1)
        self.move(live, "started")

    def learn_version(self, live: LiveSample) -> None:
        """Note the version of a sample's first token, if it has one."""
        version, group = live.sample.oldest_version, live.group
        if version is not None and (group.oldest_version is None or version < group.oldest_version):
            self._set_oldest(group, version)

    def restart(self, live: LiveSample) -> None:
        """An interrupted sample starts anew, without the tokens it had."""
        self.move(live, "restarted")
        live.sample = live.sample.restart()
        versions = (member.sample.oldest_version for member in live.group.members)
        self._set_oldest(live.group, min((v for v in versions if v is not None), default=None))

    def _set_oldest(self, group: LiveGroup, oldest_version: int | None) -> None:
        self._count_age(group, -1)
        group.oldest_version = oldest_version
        self._count_age(group, +1)
        if oldest_version is None:
            return
        heapq.heappush(self._by_age, (oldest_version, group.order, group))
        if len(self._by_age) > max(_FEW, 2 * len(self._groups)):
            self._by_age = [
                (group.oldest_version, group.order, group)
                for group in self._groups.values()
                if group.oldest_version is not None and not group.is_complete
            ]
            heapq.heapify(self._by_age)

    def _count_age(self, group: LiveGroup, sign: int) -> None:
        version = group.age_version
        if version is not None:
            self.num_by_version[version] += sign * len(group.members)
            if not self.num_by_version[version]:
                del self.num_by_version[version]

    def hold_back(self, live: LiveSample) -> None:
        """Keep an interrupted sample from running until `release`."""
        self.held_back[live.sample_id] = live

    def release(self) -> None:
        """Let all samples that were held back run again."""
        held_back = tuple(self.held_back.values())
        self.held_back.clear()
        for live in held_back:
            self._place(live)

    def _queue(self, live: LiveSample) -> None:
        """Put a sample that has begun into its queue."""
        self._num_queued += 1
        live.queued = self._num_queued
        try:
            heapq.heappush(self._begun, (self._rank(live), live.order, live))
        except Exception as error:
            name = live.sample_id
            raise RolloutError(f"the resume order raised for sample {name}: {error!r}") from error

    def pop_runnable(self) -> LiveSample | None:
        """Take the sample that runs next out of its queue; the caller starts it."""
        suspect = self.suspects.pop(self.can_run)
        if suspect is not None:
            return suspect
        # an entry may be left of a sample that was held back meanwhile, or is a suspect by now
        while self._begun:
            try:
                resumable = heapq.heappop(self._begun)[-1]
            except TypeError as error:
                raise RolloutError(f"ranks of the resume order do not compare: {error}") from error
            if (
                resumable.state in (_S.INTERRUPTED, _S.READY)
                and resumable.sample_id not in self.held_back
                and not resumable.sample.num_deaths
            ):
                return resumable
        while self._waiting:
            startable = heapq.heappop(self._waiting)[-1]
            if startable.state is _S.WAITING and not startable.sample.num_deaths:
                return startable
        return None

    def can_run(self, live: LiveSample) -> bool:
        """Whether a sample waits for nothing but its turn."""
        return live.state in _RUNNABLE and live.sample_id not in self.held_back

    def oldest_group(self) -> LiveGroup | None:
        """The incomplete live group with the oldest token; None while no token is known."""
        while self._by_age:
            version, _, group = self._by_age[0]
            if group.is_live and not group.is_complete and version == group.oldest_version:
                return group
            heapq.heappop(self._by_age)
        return None

    def remove(self, group: LiveGroup, event: Event) -> None:
        """Let an event happen to all members of a group, which ends its life here.

        Raises:
            RolloutError: If a member is in another state than the event needs; then none leaves.
        """
        for live in group.members:
            transition(live, event)
        group.is_live = False
        self._count_age(group, -1)
        del self._groups[group.group_id]
        for live in group.members:
            self.move(live, event)
            self.num_in[live.state] -= 1
        group.let_go()
