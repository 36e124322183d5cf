"""Dispatcher: owns the state of every live sample and group, and decides what runs next.

Invariants, kept here and in `roster`:
    * A live sample is in exactly one state; an event that does not fit its state raises.
    * Groups are admitted, handed over and dropped whole (invariant 4).
    * A group is admitted only while ``live + G <= (max_staleness + 1) * B`` and
      ``unfinished + G <= ceil(oversampling_factor * B)``: see `staleness`. What is alive counts,
      never what was once started, so nothing changes when versions do not begin at 0. Where
      interruption leaves no tokens, samples that generate cannot get old and do not count as live,
      unless the trainer waits for them (``on_stale="wait"``).
    * At most `max_inflight` samples are in flight; those that have begun go on before new ones
      start. A sample whose environment acts is not in flight, but has not ended either.
    * With ``on_stale="evict"`` a group with a member too old to be trained is evicted whole, unless
      all its members are scored: such a group is on its way to the buffer, which then evicts it. So
      no token is discarded twice.
    * Nothing is latched: a hold ends when its cause ends, so a lost batch cannot block generation.

Pure: no I/O, no clock, no ray, no torch. The simulator, the property tests and the rollout worker
run this same class. A decision costs O(log n) in the number of live samples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ray_apr.config import PartialRolloutConfig
from ray_apr.exceptions import ConfigError, RolloutError
from ray_apr.rollout.roster import DispatcherCounts, Roster
from ray_apr.staleness import (
    is_stale,
    leaves_none_behind,
    next_version,
    num_untrained,
    oldest_trainable,
    staleness_capacity,
    supplementation_capacity,
)
from ray_apr.types import SampleState


class Dispatcher:
    """Decides which groups and samples start, resume, stop and are dropped.

    A method that takes an id raises `RolloutError` if it is not live here; an event also if the
    sample is in another state than it needs.

    Args:
        config: When samples are started, interrupted and dropped.
        batch_size: Samples of one optimizer step, a multiple of `group_size`.
        group_size: Samples of one prompt.
        max_inflight: Most samples in the engines at once.
        policy_version: Version of the engines at the start; above 0 after a restore.

    Raises:
        ConfigError: If a number is not positive or the batch is no multiple of the group.

    Example:
        >>> d = Dispatcher(PartialRolloutConfig(), batch_size=4, group_size=2, max_inflight=1)
        >>> d.num_groups_to_start()
        4
        >>> d.add_group("g0", ["g0-0", "g0-1"])
        >>> d.next_start(), d.next_start()
        ('g0-0', None)
    """

    def __init__(
        self,
        config: PartialRolloutConfig,
        *,
        batch_size: int,
        group_size: int,
        max_inflight: int,
        policy_version: int = 0,
    ) -> None:
        for name, value in (("group_size", group_size), ("max_inflight", max_inflight)):
            if value < 1:
                raise ConfigError(name, value, "must be at least 1")
        if batch_size < 1 or batch_size % group_size:
            remedy = f"must be a positive multiple of group_size = {group_size}"
            raise ConfigError("batch_size", batch_size, remedy)
        self._config = config
        self._batch_size = batch_size
        self._group_size = group_size
        self._max_inflight = max_inflight
        self._policy_version = policy_version
        self._trainer_version = policy_version
        self._roster = Roster(config.resume_order)
        self._num_owed = 0
        self._num_filtered = 0
        """Groups since the last one that was kept."""
        self._num_buffered = 0
        self._num_handed = 0
        self._has_interrupted = False
        self._in_tail_round = False

    @property
    def policy_version(self) -> int:
        """Version of the engines, as last told by `on_version`."""
        return self._policy_version

    def __contains__(self, sample_id: str) -> bool:
        """Whether the sample is live here: neither handed to the buffer nor dropped."""
        return sample_id in self._roster

    def state_of(self, sample_id: str) -> SampleState:
        """State of a live sample; raises `RolloutError` for any other."""
        return self._roster.sample(sample_id).state

    def is_resumed(self, sample_id: str) -> bool:
        """Whether a live sample has tokens of an earlier call; raises for any other."""
        return self._roster.sample(sample_id).oldest_version is not None

    def members_of(self, group_id: str) -> tuple[str, ...]:
        """Sample ids of a live group; raises `RolloutError` for any other."""
        return tuple(s.sample_id for s in self._roster.group(group_id).members)

    @property
    def is_held(self) -> bool:
        """Whether nothing starts because all batches until the next sync are there (batch_full).

        Not while the trainer may be waiting for a group that is still generated (on_stale "wait"):
        the two would wait for each other.
        """
        if self._config.interrupt != "batch_full":
            return False
        full = self._num_untrained() >= self._batch_size * self._config.sync_every
        return full and (self._config.on_stale != "wait" or self._leaves_none_behind())

    @property
    def max_inflight(self) -> int:
        """Most samples in the engines at once."""
        return self._max_inflight

    @max_inflight.setter
    def max_inflight(self, max_inflight: int) -> None:
        self._max_inflight = max(1, max_inflight)

    @property
    def max_unfinished(self) -> int:
        """Samples that have not ended beyond which no group starts."""
        return self._may_generate(0)

    @property
    def in_tail_round(self) -> bool:
        """Whether groups that full batches stopped have this version to themselves."""
        return self._in_tail_round

    def begin_round(self, num_requeued: int) -> None:
        """Decide what this version is for, where a full batch makes the rest start anew.

        What was stopped twice is long. Beside shorter ones it would be stopped again and again; so
        it waits until it fills a batch of its own, which then runs without supplementation.

        Args:
            num_requeued: Such groups, which have left the roster.
        """
        restarts = self._config.restarts and self._config.after_interrupt == "restart"
        self._in_tail_round = restarts and num_requeued * self._group_size >= self._batch_size

    @property
    def is_starved(self) -> bool:
        """Whether the buffer holds no batch beside the one in training."""
        return self._num_untrained() <= self._batch_size

    @property
    def is_generating(self) -> bool:
        """Whether any sample still has to generate."""
        return self._roster.num_unfinished > 0

    @property
    def num_by_version(self) -> Mapping[int, int]:
        """Samples of live groups that have started, by the version of the group's oldest token."""
        return self._roster.num_by_version

    def counts(self) -> DispatcherCounts:
        """How many samples are where."""
        return self._roster.counts(buffered=self._num_untrained())

    def diagnosis(self) -> str:
        """Say in one line what is waited for; for the error of a wait that ran out. O(n)."""
        counts, groups = self.counts(), self._roster.groups
        num_unscored = sum(g.waits_for_reward for g in groups)
        capacities = self._capacities()
        limit = min(capacities, key=capacities.__getitem__)
        num_groups = capacities[limit] // self._group_size
        admission = f"{num_groups} more groups may start"
        if not num_groups:
            admission = f"no group may start ({limit} is reached)"
        turns = ""
        if counts.stepping or counts.ready:
            turns = (
                f"{counts.stepping} samples wait for their environment, "
                f"{counts.ready} for their next turn, "
            )
        hold = "; held until the next version, as the batch is full" if self.is_held else ""
        if self._num_filtered:
            hold += f"; the last {self._num_filtered} groups were filtered, none was kept"
        return (
            f"{num_unscored} of {len(groups)} groups wait for reward, "
            f"{counts.inflight} samples in flight (at most {self._max_inflight}), "
            f"{counts.interrupted} interrupted, {counts.waiting} waiting, {turns}"
            f"{counts.buffered} buffered of the {self._batch_size} of a batch "
            f"at version {self._policy_version}; {admission}{hold}"
        )

    def num_groups_to_start(self) -> int:
        """Whole groups that may be admitted now, by the tightest of the limits."""
        num_groups = min(self._capacities().values()) // self._group_size
        by_batch = self._config.admission == "batch" or self._in_tail_round
        if by_batch and self.is_generating:
            return min(num_groups, self._num_owed)
        return num_groups

    def add_group(self, group_id: str, sample_ids: Sequence[str]) -> None:
        """Admit a group of new ids; `num_groups_to_start` says how many."""
        if len(sample_ids) != self._group_size:
            raise RolloutError(
                f"group {group_id!r} has {len(sample_ids)} samples, not {self._group_size}"
            )
        self._roster.add_group(group_id, sample_ids)
        self._num_owed = max(0, self._num_owed - 1)

    def next_start(self) -> str | None:
        """Mark the next sample as in flight and return it: those that have begun first.

        Returns:
            Its id; None while `max_inflight` is reached, nothing can run, or the batch is full.
        """
        if len(self._roster.inflight) >= self._max_inflight or self.is_held:
            return None
        entry = self._roster.pop_runnable()
        if entry is None and self._roster.held_back and not self._roster.inflight:
            self._roster.release()  # nothing else is left to run
            entry = self._roster.pop_runnable()
        if entry is None:
            return None
        self._roster.note_start(entry, self._policy_version)
        self._roster.move(entry, SampleState.INFLIGHT)
        self._has_interrupted = False
        return entry.sample_id

    def to_interrupt(self) -> tuple[str, ...]:
        """Ids to abort now: all in flight, once, when ``batch_full`` holds; else none.

        Once means until something starts again or the version changes. They stay in flight until
        `on_interrupted` or, if they were faster, `on_finished`.
        """
        if self._has_interrupted or not self.is_held:
            return ()
        self._has_interrupted = True
        return tuple(self._roster.inflight)

    def on_interrupted(
        self, sample_id: str, *, oldest_version: int | None, num_tokens: int = 0
    ) -> None:
        """A sample was aborted before its end; without any token it waits again, at the front."""
        entry = self._roster.expect(sample_id, "on_interrupted", SampleState.INFLIGHT)
        self._roster.learn_version(entry, oldest_version)
        entry.num_tokens = num_tokens
        self.on_retry(sample_id)
        tail_round = self._config.tail_round
        if tail_round is not None and entry.num_interruptions > 1:
            self._roster.hold_back(entry)
            if len(self._roster.held_back) >= tail_round or self._is_aged(entry.oldest_version):
                self._roster.release()

    def on_restart(self, sample_id: str) -> None:
        """An interrupted sample lost its tokens on purpose and waits to start anew."""
        entry = self._roster.expect(sample_id, "on_restart", SampleState.INTERRUPTED)
        self._roster.forget_tokens(entry)
        self._roster.move(entry, SampleState.WAITING)

    def on_retry(self, sample_id: str) -> None:
        """A generate call failed and will be tried again; tokens of earlier calls are kept."""
        entry = self._roster.expect(sample_id, "on_retry", SampleState.INFLIGHT)
        has_tokens = entry.oldest_version is not None
        self._roster.move(entry, SampleState.INTERRUPTED if has_tokens else SampleState.WAITING)

    def on_reset(self, sample_id: str) -> None:
        """A sample cannot start before its environment has said what comes first: `on_stepped`."""
        entry = self._roster.expect(sample_id, "on_reset", SampleState.WAITING)
        self._roster.move(entry, SampleState.STEPPING)

    def on_turn_ended(self, sample_id: str, *, oldest_version: int | None, num_tokens: int) -> None:
        """A sample has ended its turn and left the engine; its environment acts: `on_stepped`."""
        entry = self._roster.expect(sample_id, "on_turn_ended", SampleState.INFLIGHT)
        self._roster.learn_version(entry, oldest_version)
        entry.num_tokens = num_tokens
        self._roster.move(entry, SampleState.STEPPING)

    def on_stepped(self, sample_id: str) -> None:
        """The environment has answered; the sample goes on as `next_start` says."""
        entry = self._roster.expect(sample_id, "on_stepped", SampleState.STEPPING)
        has_begun = entry.oldest_version is not None
        self._roster.move(entry, SampleState.READY if has_begun else SampleState.WAITING)

    def on_done(self, sample_id: str) -> None:
        """The environment says that the sample has ended with its last turn."""
        entry = self._roster.expect(sample_id, "on_done", SampleState.STEPPING)
        self._roster.move(entry, SampleState.FINISHED)

    def on_cut(self, sample_id: str) -> None:
        """A sample between two turns is interrupted, because it is not to keep its tokens."""
        states = (SampleState.STEPPING, SampleState.READY)
        entry = self._roster.expect(sample_id, "on_cut", *states)
        self._roster.move(entry, SampleState.INTERRUPTED)

    def on_finished(self, sample_id: str, *, oldest_version: int | None = None) -> None:
        """A sample has its last token; with its oldest version, `evict_stale` can judge it."""
        entry = self._roster.expect(sample_id, "on_finished", SampleState.INFLIGHT)
        self._roster.learn_version(entry, oldest_version)
        self._roster.move(entry, SampleState.FINISHED)

    def on_scored(self, sample_id: str) -> str | None:
        """A finished sample has its reward.

        Returns:
            Id of its group when all members are scored and it goes to the buffer; else None.
        """
        entry = self._roster.expect(sample_id, "on_scored", SampleState.FINISHED)
        self._roster.move(entry, SampleState.SCORED)
        return entry.group.group_id if entry.group.is_complete else None

    def on_buffered(self, group_id: str) -> None:
        """A complete group was handed to the buffer and counts as buffered from now on."""
        group = self._roster.group(group_id)
        if not group.is_complete:
            raise RolloutError(
                f"group {group_id} has {group.num_scored} of {len(group.members)} rewards; "
                "only a whole group goes to the buffer"
            )
        self._roster.remove(group, SampleState.BUFFERED)
        self._num_buffered += self._group_size
        self._num_handed += self._group_size
        self._num_filtered = 0

    def on_failed(self, sample_id: str) -> tuple[str, ...]:
        """Drop the whole group of a sample whose generation or reward failed for good.

        Returns:
            Ids of all its members, those in flight included, which the caller aborts.
        """
        self._num_owed += 1
        return self._roster.remove(self._roster.sample(sample_id).group, SampleState.FAILED)

    def on_given_up(self, sample_id: str) -> tuple[str, ...]:
        """Drop the group of an interrupted sample that is not to be resumed; returns all ids."""
        entry = self._roster.expect(sample_id, "on_given_up", SampleState.INTERRUPTED)
        self._num_owed += 1
        return self._roster.remove(entry.group, SampleState.EVICTED)

    def on_put_off(self, group_id: str) -> tuple[str, ...]:
        """Drop a live group that has not begun, to be admitted later; returns all ids."""
        return self._roster.remove(self._roster.group(group_id), SampleState.EVICTED)

    def on_filtered(self, group_id: str) -> tuple[str, ...]:
        """Drop a live group for its content; returns the ids of all its members."""
        self._num_owed += 1
        self._num_filtered += 1
        return self._roster.remove(self._roster.group(group_id), SampleState.FILTERED)

    def on_version(self, policy_version: int) -> tuple[str, ...]:
        """The engines have new weights; returns the ids of the groups that `evict_stale` drops."""
        if policy_version < self._policy_version:
            raise RolloutError(
                f"policy version went back from {self._policy_version} to {policy_version}"
            )
        self._policy_version = policy_version
        self._has_interrupted = False
        self._release_aged()
        return self.evict_stale()

    def evict_stale(self) -> tuple[str, ...]:
        """Drop, whole, each group that can never be trained any more; returns their group ids.

        A group is judged by its oldest token that is known here. Its members may be in flight: the
        caller aborts them and discards their tokens. With ``on_stale="mask"`` a group that still
        generates is never too old: its next tokens will be fresh.
        """
        evicted: list[str] = []
        if self._config.on_stale == "mask":
            return ()
        group = self._roster.oldest_group()
        while group is not None and self._is_stale(group.oldest_version):
            self._roster.remove(group, SampleState.EVICTED)
            self._num_owed += 1
            evicted.append(group.group_id)
            group = self._roster.oldest_group()
        return tuple(evicted)

    def on_buffer_counts(
        self,
        *,
        num_buffered: int,
        num_received: int | None = None,
        trainer_version: int | None = None,
    ) -> None:
        """The buffer told how many samples it holds.

        Its reports cross with the hand-overs and syncs that are seen here; with the two optional
        numbers the count is exact all the same. None means that nothing is on its way.

        Args:
            num_buffered: Samples neither trained nor dropped, those of the step in training
                included until it is acknowledged.
            num_received: Samples that were ever handed to it since this dispatcher began.
            trainer_version: Version that the next step to be acknowledged trains: the first
                version of the run + the steps acknowledged.
        """
        on_the_way = 0 if num_received is None else self._num_handed - num_received
        self._num_buffered = num_buffered + on_the_way
        self._trainer_version = self._policy_version if trainer_version is None else trainer_version

    def _is_stale(self, oldest_version: int | None) -> bool:
        """Whether it is too old; a token newer than the last `on_version` (on its way) is not."""
        if oldest_version is None or oldest_version > self._policy_version:
            return False
        return is_stale(self._policy_version, oldest_version, self._config.max_staleness)

    def _release_aged(self) -> None:
        """Resume what was held back once one of them would be too old at the next version."""
        if any(self._is_aged(e.oldest_version) for e in self._roster.held_back.values()):
            self._roster.release()

    def _is_aged(self, version: int | None) -> bool:
        """Whether a token would be too old at the next version."""
        oldest = oldest_trainable(next_version(self._policy_version), self._config.max_staleness)
        return version is not None and version < oldest

    def _leaves_none_behind(self) -> bool:
        """Whether the trainer takes its next batch, whatever the buffer holds."""
        return leaves_none_behind(
            {},
            self._roster.num_by_version,
            policy_version=self._trainer_version,
            max_staleness=self._config.max_staleness,
            batch_size=self._batch_size,
        )

    def _num_untrained(self) -> int:
        return num_untrained(
            num_buffered=self._num_buffered,
            batch_size=self._batch_size,
            trainer_version=self._trainer_version,
            policy_version=self._policy_version,
        )

    def _may_generate(self, num_unfinished: int) -> int:
        """Samples that may generate beside so many."""
        return supplementation_capacity(
            batch_size=self._batch_size,
            oversampling_factor=1.0 if self._in_tail_round else self._config.oversampling_factor,
            num_unfinished=num_unfinished,
        )

    def _capacities(self) -> dict[str, int]:
        """Samples that may be admitted, by the setting that limits them."""
        config, roster, size = self._config, self._roster, self._batch_size
        unfinished = roster.num_unfinished
        ended = roster.num_in[SampleState.FINISHED] + roster.num_in[SampleState.SCORED]
        ageless = config.restarts and config.on_stale != "wait"
        num_live = ended + self._num_untrained() + (0 if ageless else unfinished)
        if config.on_stale == "mask":
            oldest = oldest_trainable(self._policy_version, config.max_staleness)
            num_live -= sum(n for v, n in roster.num_by_version.items() if v < oldest)
        capacities = {
            "oversampling_factor": self._may_generate(unfinished),
            "max_staleness": staleness_capacity(
                batch_size=size, max_staleness=config.max_staleness, num_live=num_live
            ),
        }
        if ageless and capacities["max_staleness"] > 0:
            del capacities["max_staleness"]  # what generates has no age, however much it is
        if config.restarts and self.is_held:
            capacities["interrupt"] = 0  # what the next version is for is not decided yet
        if config.max_live_batches is not None:
            bound = math.floor((config.max_live_batches + config.sync_every - 1) * size)
            capacities["max_live_batches"] = max(0, bound - num_live)
        return capacities
