"""The buffer's stock: groups that wait, batches of two steps at most, and where tokens went.

Invariants, kept by `Stock`:
    * A group is on the shelf, in the batch of the granted step or the next one, or gone: trained or
      evicted.
    * A batch is chosen against the version that trains it, and listed in an order that depends on
      its groups alone, not on which of them was scored first. That of the step after the granted
      one, whose version is known, too, is chosen `LEAD_S` before the granted one ends, as long as
      the last step took: then it is there in time, and groups that come late are not yet too old.
      A step of a run that has begun again gets the batch that it had before (`go_on`).
    * Each generated token that came in is in one place of its ledger (invariant 1): buffered, then
      trained or discarded, as stale with its whole group or as masked beside newer ones.

Pure: no I/O, no clock, no ray, no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ray_apr.config import OnStale
from ray_apr.core.exceptions import APRError, RolloutError
from ray_apr.core.group import GroupMeta, SampleMeta
from ray_apr.core.ledger import LedgerSnapshot, TokenLedger
from ray_apr.core.staleness import next_version, oldest_trainable
from ray_apr.scheduling.batch import BatchPlan, plan_batch
from ray_apr.scheduling.grant import BatchTicket, Grant
from ray_apr.scheduling.shelf import Shelf

LEAD_S = 2.0
"""More than a batch takes from its choice to the train workers."""
_MOST_GONE = 1 << 14
"""More groups than leave the buffer while a call of the rollout worker is made again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferStats:
    """Figures of the buffer."""

    ledger: LedgerSnapshot
    """Its side of the ledger. Tokens of responses that ``algorithm.overlong_filter`` leaves out of
    the loss count as trained: they shaped the advantages of their group."""
    buffered_samples: int
    trained_samples: int
    """Samples of the batches that were trained."""
    evicted_samples: int
    read_ahead_max: int
    """Most samples that were handed to Ray Data and not yet trained."""
    held_groups: tuple[str, ...]
    """Groups that are neither trained nor evicted."""


class Stock:
    """What the buffer holds, and what became of the rest.

    Args:
        batch_size: Samples of one step.
        max_staleness: Oldest token that is trained, in policy versions.
        on_stale: What becomes of groups whose oldest token is beyond that.
        num_ranks: Train workers.
        micro_batch_tokens: Token budget of one forward pass.
        mini_batches: Optimizer steps of one batch.
        packed: Whether micro-batches have no padding.
        num_steps: Steps of the run, after which no batch is chosen; None: it has no end.
    """

    def __init__(
        self,
        *,
        batch_size: int,
        max_staleness: int,
        on_stale: OnStale,
        num_ranks: int,
        micro_batch_tokens: int,
        mini_batches: int = 1,
        packed: bool = False,
        num_steps: int | None = None,
    ) -> None:
        self._batch_size = batch_size
        self._max_staleness = max_staleness
        self._on_stale = on_stale
        self._num_ranks = num_ranks
        self._micro_batch_tokens = micro_batch_tokens
        self._mini_batches = mini_batches
        self._packed = packed
        self._num_steps = num_steps
        self._shelf = Shelf(batch_size=batch_size, max_staleness=max_staleness, on_stale=on_stale)
        self._refs: dict[str, Any] = {}
        """Payload of each group on the shelf."""
        self.plan: dict[int, tuple[str, ...]] = {}
        """Groups of each step that is still to get the batch that it had before (`go_on`)."""
        self._planned: dict[str, tuple[GroupMeta, Any]] = {}
        """Those of them that are here, with their payload."""
        self._awaited: set[str] = set()
        """Ids of those that are to come."""
        self._unfinished: Mapping[int, int] = {}
        self._gone: dict[str, None] = {}
        """Groups that were trained or evicted, the last `_MOST_GONE` of them."""
        self._handed_out: dict[str, int] = {}
        self._read_ahead_max = 0
        self._ledger = TokenLedger()
        self._trained_samples = self._evicted_samples = 0
        self.granted: Grant | None = None
        """The step that the trainer waits for or trains."""
        self._next: Grant | None = None
        """The one after it, once its batch may be chosen."""
        self._step_s = 0.0
        """From the moment that the last step had its batch to its end."""
        self.num_received = 0
        """Samples ever put in."""
        self.trainer_version: int | None = None
        """Policy version after the last step that ended; None before the first one."""

    @property
    def num_waiting(self) -> int:
        """Samples that no step has yet."""
        planned = sum(len(group.samples) for group, _ in self._planned.values())
        return self._shelf.num_samples + planned

    @property
    def num_buffered(self) -> int:
        """Samples neither trained nor evicted, those of the step in training included."""
        return self.num_waiting + sum(grant.num_samples for grant in self.batches)

    @property
    def batches(self) -> tuple[Grant, ...]:
        """The steps that have their batch, and do not end yet: none, one or two."""
        return tuple(g for g in (self.granted, self._next) if g is not None and g.groups)

    def put(self, samples: Sequence[SampleMeta], ref: Any) -> None:
        """Take a whole, scored group, if it has not come yet: who puts it may not have heard that
        it is here.

        Raises:
            RolloutError: If another group of this id is here.
        """
        group_id = samples[0].group_id
        if group_id in self._gone:
            return
        if self._holds(group_id):
            known = next(group for group, _ in self.held() if group.group_id == group_id)
            if known.samples != tuple(samples):
                raise RolloutError(f"group {group_id} is in the buffer, with other samples")
            return
        # the samples before it are a number that only grows: the order of arrival
        group = GroupMeta(group_id=group_id, sequence=self.num_received, samples=tuple(samples))
        self.num_received += len(group.samples)
        self._ledger.take_over(group.num_generated)
        if group_id in self._awaited:
            self._awaited.remove(group_id)
            self._planned[group_id] = (group, ref)
        else:
            self._shelve(group, ref)

    def _holds(self, group_id: str) -> bool:
        is_waiting = group_id in self._refs or group_id in self._planned
        batches = (group for grant in self.batches for group in grant.groups)
        return is_waiting or any(group.group_id == group_id for group in batches)

    def go_on(self, plan: Mapping[int, Sequence[str]]) -> None:
        """Give steps the batches that they had before, once their groups are here.

        Args:
            plan: Ids of the groups of each step; until it is through, nothing is evicted.
        """
        self.plan = {step: tuple(groups) for step, groups in plan.items()}
        self._awaited = {group for groups in plan.values() for group in groups}

    def set_unfinished(self, by_version: Mapping[int, int]) -> bool:
        """Note how many samples still generate or wait for a reward, by their oldest version;
        returns whether that is news."""
        known, self._unfinished = self._unfinished, dict(by_version)
        return self._unfinished != known

    def grant(self, step: int, policy_version: int, now: float) -> None:
        """The trainer is ready for `step`, whose batch may be there; one of a step that was not
        trained comes back first."""
        ahead = self._next if self.granted is None else None
        if ahead is not None and (ahead.step, ahead.policy_version) == (step, policy_version):
            self.granted, self._next = ahead, None
            ahead.granted_at = ahead.ready_at = now
            return
        self.return_untrained()
        self.granted = self._grant_of(step, policy_version, now)

    def _grant_of(self, step: int, policy_version: int, now: float) -> Grant:
        oldest = oldest_trainable(policy_version, self._max_staleness)
        return Grant(step, policy_version, oldest, now)

    def awaits_batch_of(self, step: int) -> bool:
        """Whether groups of a step are to come that had its batch before (`go_on`)."""
        return step in self.plan

    @property
    def open_step(self) -> int | None:
        """The first step whose batch no reader can have got; None before the first grant."""
        if self.granted is None:
            return None
        first = self.granted.step
        taken = {grant.step for grant in self.batches}
        taken |= {step for step in (first, first + 1) if self.awaits_batch_of(step)}
        while first in taken:
            first += 1
        return first

    def next_step(self, last_step: int | None) -> int | None:
        """Step of the batch that a reader gets next; None before the first grant.

        Args:
            last_step: Of its last batch, None before that; it may have got it of another buffer.
        """
        if self.granted is None:
            return None
        return self.granted.step if last_step is None else max(self.granted.step, last_step + 1)

    def next_batch(self, last_step: int | None) -> Grant | None:
        """The step whose batch a reader gets next, if it is there."""
        step = self.next_step(last_step)
        return next((grant for grant in self.batches if grant.step == step), None)

    def next_in_s(self, now: float) -> float:
        """Seconds until the batch of the step after the granted one may be chosen; infinite where
        it may be already, and where there is no such step."""
        granted = self.granted
        if self._next is not None or granted is None or not granted.groups:
            return math.inf
        if granted.step + 1 == self._num_steps:
            return math.inf
        return max(0.0, granted.ready_at + self._step_s - LEAD_S - now)

    def choose(self, now: float) -> tuple[GroupMeta, ...]:
        """Choose the granted batch, and the one after it where that is due, each if it is complete;
        returns the groups that were evicted."""
        evicted: tuple[GroupMeta, ...] = ()
        granted = self.granted
        if granted is not None and not granted.groups:
            evicted += self._choose_for(granted)
            granted.ready_at = now
        if granted is not None and self.next_in_s(now) == 0:
            version = next_version(granted.policy_version)
            self._next = self._grant_of(granted.step + 1, version, now)
        if self._next is not None and not self._next.groups:
            evicted += self._choose_for(self._next)
        return evicted

    def _choose_for(self, grant: Grant) -> tuple[GroupMeta, ...]:
        if grant.step in self.plan:
            self._choose_again(grant)
            return ()
        selection = self._shelf.select(grant.policy_version, self._unfinished)
        for group in selection.evicted:
            del self._refs[group.group_id]
            self._let_go(group)
            self._evicted_samples += len(group.samples)
            self._ledger.discard(group.num_generated, "buffered", "stale")
        if selection.chosen:
            refs = {group.group_id: self._refs.pop(group.group_id) for group in selection.chosen}
            grant.fill([(group, refs[group.group_id]) for group in selection.chosen])
        return selection.evicted

    def _choose_again(self, grant: Grant) -> None:
        wanted = self.plan[grant.step]
        if all(group in self._planned for group in wanted):
            grant.fill([self._planned.pop(group) for group in wanted])
            del self.plan[grant.step]

    def hand_out(self, last_step: int | None = None, rank: int | None = None) -> BatchTicket:
        """The next batch of a reader; without a plan if there is none.

        Args:
            last_step: Of its last batch; None before that.
            rank: Has the payload that its row needs; None has all.
        """
        grant = self.next_batch(last_step)
        if grant is None:
            return BatchTicket()
        plan = grant.plan = grant.plan or self._plan(grant)
        self._handed_out.update({g.group_id: len(g.samples) for g in grant.groups})
        self._read_ahead_max = max(self._read_ahead_max, sum(self._handed_out.values()))
        wanted = set(range(len(grant.refs)) if rank is None else plan.groups_of(rank))
        refs = (ref if i in wanted else None for i, ref in enumerate(grant.refs))
        return BatchTicket(plan=plan, refs=tuple(refs))

    def batch_of(self, step: int) -> Grant:
        """The grant of a step, with its batch.

        Raises:
            APRError: If this is not the step whose batch was chosen.
        """
        grant = self.granted
        if grant is None or not grant.groups or grant.step != step:
            raise APRError(f"step {step} was trained, but its batch was not handed out")
        return grant

    def end_step(self, step: int, now: float) -> Grant:
        """The optimizer has done `step`; returns the grant with the batch that was trained.

        Raises:
            APRError: If this is not the step whose batch was chosen.
        """
        grant = self.batch_of(step)
        for group in grant.groups:
            trained = sum(s.trainable_tokens(grant.oldest_version) for s in group.samples)
            self._ledger.move(trained, "buffered", "trained")
            self._ledger.discard(group.num_generated - trained, "buffered", "masked")
            self._handed_out.pop(group.group_id, None)
            self._let_go(group)
        self._trained_samples += grant.num_samples
        self.trainer_version = next_version(grant.policy_version)
        self._step_s = now - grant.ready_at
        self.granted = None
        return grant

    def return_untrained(self) -> None:
        """Put the batches of steps that never ended back on the shelf, e.g. after a restart."""
        untrained, self.granted, self._next = self.batches, None, None
        for grant in untrained:
            for group, ref in zip(grant.groups, grant.refs, strict=True):
                self._shelve(group, ref)
                self._handed_out.pop(group.group_id, None)

    def held(self) -> list[tuple[GroupMeta, Any]]:
        """Groups that are neither trained nor evicted, with their payload, in order of arrival."""
        held = [(group, self._refs[group.group_id]) for group in self._shelf]
        held += self._planned.values()
        for grant in self.batches:
            held += zip(grant.groups, grant.refs, strict=True)
        return sorted(held, key=lambda pair: pair[0].sequence)

    @property
    def num_discarded(self) -> int:
        """Tokens that were dropped here, as they were too old."""
        return sum(self._ledger.snapshot().discarded.values())

    def stats(self) -> BufferStats:
        """Figures of this moment."""
        return BufferStats(
            ledger=self._ledger.snapshot(),
            buffered_samples=self.num_buffered,
            trained_samples=self._trained_samples,
            evicted_samples=self._evicted_samples,
            read_ahead_max=self._read_ahead_max,
            held_groups=tuple(group.group_id for group, _ in self.held()),
        )

    def diagnosis(self) -> str:
        """Say in a few words why there is no batch."""
        there = f"{self.num_waiting} of {self._batch_size} samples are there"
        if self._on_stale == "wait" and self.num_waiting >= self._batch_size:
            unfinished = dict(sorted(self._unfinished.items()))
            there += f", and older ones come first; unfinished by version: {unfinished}"
        return there

    def _let_go(self, group: GroupMeta) -> None:
        """A group is gone; who puts it again is told nothing new."""
        self._gone[group.group_id] = None
        if len(self._gone) > _MOST_GONE:
            del self._gone[next(iter(self._gone))]

    def _shelve(self, group: GroupMeta, ref: Any) -> None:
        self._shelf.add(group)
        self._refs[group.group_id] = ref

    def _plan(self, grant: Grant) -> BatchPlan:
        return plan_batch(
            grant.groups,
            step=grant.step,
            policy_version=grant.policy_version,
            oldest_version=grant.oldest_version,
            num_ranks=self._num_ranks,
            micro_batch_tokens=self._micro_batch_tokens,
            mini_batches=self._mini_batches,
            packed=self._packed,
        )
