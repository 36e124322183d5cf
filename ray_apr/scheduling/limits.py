"""Limits: what is alive on both sides of the buffer, what may start beside it, what is too old.

Invariants, kept by `Limits`:
    * A group is admitted only while ``live + G <= (max_staleness + 1) * B`` and
      ``unfinished + G <= ceil(oversampling_factor * B)``: see `staleness`. What is alive counts,
      never what was once started, so nothing changes when versions do not begin at 0. Where
      interruption leaves no tokens, samples that generate cannot get old and do not count as live,
      unless the trainer waits for them (``on_stale="wait"``).
    * Nothing is latched: a hold ends when its cause ends, so a lost batch cannot block generation.
"""

from __future__ import annotations

import math
import operator

from ray_apr.config import PartialRolloutConfig
from ray_apr.core.exceptions import ConfigError, RolloutError
from ray_apr.core.staleness import (
    is_stale,
    leaves_none_behind,
    next_version,
    num_untrained,
    oldest_trainable,
    staleness_capacity,
    supplementation_capacity,
)
from ray_apr.scheduling.admission import ADMISSIONS, Load, Room, batch
from ray_apr.scheduling.live import Counts, LiveGroup, LiveSample
from ray_apr.scheduling.queues import LiveSamples
from ray_apr.scheduling.resume_order import RESUME_ORDERS
from ray_apr.scheduling.retries import Retries


class Limits:
    """The counting part of the scheduler; see there for the arguments."""

    def __init__(
        self,
        config: PartialRolloutConfig,
        *,
        batch_size: int,
        group_size: int,
        max_inflight: int,
        policy_version: int,
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
        self.max_inflight = max_inflight
        """Most samples in the engines at once."""
        self.policy_version = policy_version
        """Version of the engines, as last told."""
        self._trainer_version = policy_version
        order, rule = config.resume_order, config.admission
        self.live = LiveSamples(RESUME_ORDERS[order] if isinstance(order, str) else order)
        """Every live sample and group, and the ledger of their tokens."""
        self._admission = ADMISSIONS[rule] if isinstance(rule, str) else rule
        self._retries = Retries(batch_size // group_size)
        self._num_owed = 0
        """Groups that were dropped and not yet replaced."""
        self._num_filtered = 0
        """Groups since the last one that was kept."""
        self._num_buffered = 0
        self._num_handed = 0

    @property
    def max_unfinished(self) -> int:
        """Samples that have not ended beyond which no group starts."""
        return self._may_generate(0)

    @property
    def max_buffered(self) -> int:
        """Samples that have ended and are not trained beyond which no group starts."""
        return self._config.max_buffered_samples(self._batch_size)

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
    def keeps_tokens(self) -> bool:
        """Whether a sample that is interrupted goes on with its tokens."""
        return self._config.after_interrupt == "resume"

    @property
    def is_starved(self) -> bool:
        """Whether the buffer holds no batch beside the one in training."""
        return self._num_untrained() <= self._batch_size

    def counts(self) -> Counts:
        """How many samples are where."""
        return self.live.counts(buffered=self._num_untrained())

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
            num_received: Samples that were ever handed to it since this scheduler began.
            trainer_version: Version that the next step to be acknowledged trains: the first
                version of the run + the steps acknowledged.
        """
        on_the_way = 0 if num_received is None else self._num_handed - num_received
        self._num_buffered = num_buffered + on_the_way
        self._trainer_version = self.policy_version if trainer_version is None else trainer_version

    def room(self) -> Room:
        """Whole groups that may be admitted now, by the settings and the admission rule."""
        live = self.live
        load = Load(
            policy_version=self.policy_version,
            batch_size=self._batch_size,
            group_size=self._group_size,
            num_unfinished=live.num_unfinished,
            num_ended=live.num_ended,
            num_untrained=self._num_untrained(),
            num_owed=self._num_owed,
        )
        load.room = self._allowed(load)
        if load.room.num_groups <= 0:
            return load.room
        rule = batch if self._retries.is_catching_up else self._admission
        try:
            room = min(load.room, rule(load), key=lambda room: room.num_groups)
            return Room(operator.index(room.num_groups), room.limit)
        except Exception as error:
            raise RolloutError(f"the admission rule failed, or gave no Room: {error!r}") from error

    def _allowed(self, load: Load) -> Room:
        """The tightest of the limits of the settings."""
        config, size = self._config, self._batch_size
        ageless = config.restarts and config.on_stale != "wait"
        num_live = load.num_ended + load.num_untrained + (0 if ageless else load.num_unfinished)
        if config.on_stale == "mask":
            oldest = oldest_trainable(self.policy_version, config.max_staleness)
            num_live -= sum(n for v, n in self.live.num_by_version.items() if v < oldest)
        samples, limit = self._may_generate(load.num_unfinished), "oversampling_factor"
        by_age = staleness_capacity(
            batch_size=size, max_staleness=config.max_staleness, num_live=num_live
        )
        # what generates has no age there, however much it is
        if by_age < samples and not (ageless and by_age):
            samples, limit = by_age, "max_staleness"
        if samples and config.restarts and self.is_held:
            samples, limit = 0, "interrupt"  # what the next version is for is not decided yet
        if config.max_live_batches is not None:
            bound = math.floor((config.max_live_batches + config.sync_every - 1) * size)
            if max(0, bound - num_live) < samples:
                samples, limit = max(0, bound - num_live), "max_live_batches"
        return Room(samples // self._group_size, f"{limit} is reached")

    def diagnosis(self) -> str:
        """Say in one line what is waited for; for the error of a wait that ran out. O(n)."""
        counts, groups, room = self.counts(), self.live.groups, self.room()
        num_unscored = sum(g.waits_for_reward for g in groups)
        admission = f"{room.num_groups} more groups may start"
        if not room.num_groups:
            admission = f"no group may start ({room.limit})"
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
            f"{counts.inflight} samples in flight (at most {self.max_inflight}), "
            f"{counts.interrupted} samples interrupted, "
            f"{counts.waiting} queued for an engine, {turns}"
            f"{counts.buffered} buffered of the {self._batch_size} of a batch "
            f"at version {self.policy_version}; {admission}{hold}"
        )

    def _may_generate(self, num_unfinished: int) -> int:
        """Samples that may generate beside so many."""
        factor = 1.0 if self._retries.is_catching_up else self._config.oversampling_factor
        return supplementation_capacity(
            batch_size=self._batch_size, oversampling_factor=factor, num_unfinished=num_unfinished
        )

    def _is_stale(self, group: LiveGroup) -> bool:
        """Whether it is too old; a token newer than the last version told (on its way) is not."""
        oldest, version = group.oldest_version, self.policy_version
        if oldest is None or oldest > version:
            return False
        return is_stale(version, oldest, self._config.max_staleness)

    def _is_aged(self, live: LiveSample) -> bool:
        """Whether a sample's first token would be too old at the next version."""
        oldest = oldest_trainable(next_version(self.policy_version), self._config.max_staleness)
        version = live.sample.oldest_version
        return version is not None and version < oldest

    def _leaves_none_behind(self) -> bool:
        """Whether the trainer takes its next batch, whatever the buffer holds."""
        return leaves_none_behind(
            {},
            self.live.num_by_version,
            policy_version=self._trainer_version,
            max_staleness=self._config.max_staleness,
            batch_size=self._batch_size,
        )

    def _num_untrained(self) -> int:
        return num_untrained(
            num_buffered=self._num_buffered,
            batch_size=self._batch_size,
            trainer_version=self._trainer_version,
            policy_version=self.policy_version,
        )
