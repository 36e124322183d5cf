"""The buffer's stock: groups that wait, the batch of the granted step, and where tokens went.

Invariants, kept by `Stock`:
    * A group is on the shelf, in the batch of the granted step, or gone: trained or evicted.
    * A batch is chosen against the version of its grant, and listed in an order that depends on its
      groups alone, not on which of them was scored first. A step of a run that has begun again gets
      the batch that it had before (`go_on`).
    * Each generated token that came in is in one place of its ledger (invariant 1): buffered, then
      trained or discarded, as stale with its whole group or as masked beside newer ones.

Pure: no I/O, no clock, no ray, no torch.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ray_apr.config import OnStale
from ray_apr.core.exceptions import APRError, RolloutError
from ray_apr.core.group import GroupMeta, SampleMeta
from ray_apr.core.ledger import LedgerSnapshot, TokenLedger
from ray_apr.core.staleness import next_version, oldest_trainable, staleness
from ray_apr.core.user import MAX_REWARD_METRICS
from ray_apr.scheduling.batch import BatchPlan, plan_batch
from ray_apr.scheduling.orders import Order
from ray_apr.scheduling.shelf import Shelf

_MOST_GONE = 1 << 14
"""More groups than leave the buffer while a call of the rollout worker is made again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTicket:
    """The batch of one step, or what comes before it; without either the stream has ended."""

    plan: BatchPlan | None = None
    order: Order | None = None
    """What all ranks do before the batch."""
    refs: tuple[Any, ...] = ()
    """ObjectRef of each group's samples, in the plan's order."""


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


@dataclass(slots=True)
class Grant:
    """A step that the trainer asked for, and its batch once there is one."""

    step: int
    policy_version: int
    oldest_version: int
    """Version of the oldest token that enters the loss of the step."""
    granted_at: float
    groups: tuple[GroupMeta, ...] = ()
    """The batch, in order of the ids; empty until it was chosen."""
    refs: tuple[Any, ...] = ()
    """Payload of each group."""
    num_samples: int = 0
    ticket: BatchTicket | None = None
    """Made when it is first handed out."""


class Stock:
    """What the buffer holds, and what became of the rest.

    Args:
        batch_size: Samples of one optimizer step.
        max_staleness: Oldest token that is trained, in optimizer steps.
        on_stale: What becomes of groups whose oldest token is beyond that.
        num_ranks: Train workers.
        micro_batch_tokens: Token budget of one forward pass.
        mini_batches: Optimizer steps of one batch.
        packed: Whether micro-batches have no padding.
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
    ) -> None:
        self._batch_size = batch_size
        self._max_staleness = max_staleness
        self._on_stale = on_stale
        self._num_ranks = num_ranks
        self._micro_batch_tokens = micro_batch_tokens
        self._mini_batches = mini_batches
        self._packed = packed
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
        return self.num_waiting + (0 if self.granted is None else self.granted.num_samples)

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
        batch = () if self.granted is None else self.granted.groups
        is_waiting = group_id in self._refs or group_id in self._planned
        return is_waiting or any(group.group_id == group_id for group in batch)

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
        """The trainer is ready for `step`; a batch that was not trained comes back first."""
        self.return_untrained()
        oldest = oldest_trainable(policy_version, self._max_staleness)
        self.granted = Grant(step, policy_version, oldest, now)

    def awaits_batch_of(self, step: int) -> bool:
        """Whether groups of a step are to come that had its batch before (`go_on`)."""
        return step in self.plan

    @property
    def open_step(self) -> int | None:
        """The first step whose batch no reader can have got; None before the first grant."""
        grant = self.granted
        if grant is None:
            return None
        return grant.step + (bool(grant.groups) or self.awaits_batch_of(grant.step))

    def next_step(self, last_step: int | None) -> int | None:
        """Step of the batch that a reader gets next; None before the first grant.

        Args:
            last_step: Of its last batch, None before that; it may have got it of another buffer.
        """
        grant = self.granted
        return None if grant is None else grant.step + (grant.step == last_step)

    def choose(self) -> tuple[GroupMeta, ...]:
        """Choose the granted batch if it is complete; returns the groups that were evicted."""
        grant = self.granted
        if grant is None or grant.groups:
            return ()
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
            _fill(grant, [(group, refs[group.group_id]) for group in selection.chosen])
        return selection.evicted

    def _choose_again(self, grant: Grant) -> None:
        wanted = self.plan[grant.step]
        if all(group in self._planned for group in wanted):
            _fill(grant, [self._planned.pop(group) for group in wanted])
            del self.plan[grant.step]

    def hand_out(self) -> BatchTicket:
        """The granted batch, for one of its readers; without a plan if there is none."""
        grant = self.granted
        if grant is None or not grant.groups:
            return BatchTicket()
        grant.ticket = grant.ticket or BatchTicket(plan=self._plan(grant), refs=grant.refs)
        self._handed_out.update({g.group_id: len(g.samples) for g in grant.groups})
        self._read_ahead_max = max(self._read_ahead_max, sum(self._handed_out.values()))
        return grant.ticket

    def batch_of(self, step: int) -> Grant:
        """The grant of a step, with its batch.

        Raises:
            APRError: If this is not the step whose batch was chosen.
        """
        grant = self.granted
        if grant is None or not grant.groups or grant.step != step:
            raise APRError(f"step {step} was trained, but its batch was not handed out")
        return grant

    def end_step(self, step: int) -> Grant:
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
        self.granted = None
        return grant

    def return_untrained(self) -> None:
        """Put the batch of a step that never ended back on the shelf, e.g. after a restart."""
        grant, self.granted = self.granted, None
        if grant is not None:
            for group, ref in zip(grant.groups, grant.refs, strict=True):
                self._shelve(group, ref)
                self._handed_out.pop(group.group_id, None)

    def held(self) -> list[tuple[GroupMeta, Any]]:
        """Groups that are neither trained nor evicted, with their payload, in order of arrival."""
        held = [(group, self._refs[group.group_id]) for group in self._shelf]
        held += self._planned.values()
        if self.granted is not None:
            held += zip(self.granted.groups, self.granted.refs, strict=True)
        return sorted(held, key=lambda pair: pair[0].sequence)

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


def _fill(grant: Grant, chosen: Sequence[tuple[GroupMeta, Any]]) -> None:
    """Give a granted step its batch."""
    ordered = sorted(chosen, key=lambda pair: pair[0].group_id)
    grant.groups = tuple(group for group, _ in ordered)
    grant.refs = tuple(ref for _, ref in ordered)
    grant.num_samples = sum(len(group.samples) for group in grant.groups)


def reward_figures(metrics: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Mean, least and greatest of each figure of a batch's rewards, over the samples that have it.

    Args:
        metrics: `RewardResult.metrics` of each sample. Names beyond `MAX_REWARD_METRICS` are left
            out, the last of the alphabet first.

    Example:
        >>> reward_figures([{"form": 1.0}, {"form": 0.0}, {}])
        {'reward/form_mean': 0.5, 'reward/form_min': 0.0, 'reward/form_max': 1.0}
    """
    names = sorted({name for found in metrics for name in found})[:MAX_REWARD_METRICS]
    figures: dict[str, float] = {}
    for name in names:
        values = [found[name] for found in metrics if name in found]
        figures[f"reward/{name}_mean"] = statistics.fmean(values)
        figures[f"reward/{name}_min"] = min(values)
        figures[f"reward/{name}_max"] = max(values)
    return figures


def told_figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """What a trainer is told of a step that it has trained.

    Args:
        rows: Of `sample_rows`.

    Returns:
        Figures of what rewards told beside their number (see `reward_figures`), and the turns of
        the samples together.
    """
    turns: dict[str, float] = {"num_turns": sum(row["num_turns"] for row in rows)}
    return turns | reward_figures([row["reward_metrics"] for row in rows])


def sample_rows(grant: Grant) -> list[dict[str, Any]]:
    """A row of the run folder for each sample of a step that was trained.

    A sample without any token in the loss has no staleness.
    """
    rows = []
    for sample in (sample for group in grant.groups for sample in group.samples):
        version = sample.trained_version(grant.oldest_version)
        trained = sample.trainable_tokens(grant.oldest_version)
        row = {
            "step": grant.step,
            "staleness": None if version is None else staleness(grant.policy_version, version),
            "num_generated": sample.num_generated,
            "num_masked_tokens": sample.num_generated - trained,
        }
        rows.append(row | dataclasses.asdict(sample))
    return rows
