"""Scheduler: owns every live sample, and decides what is admitted, started, stopped and dropped.

Invariants, kept here and in `queues`; those of `limits` hold, too:
    * Groups are admitted, handed over and dropped whole (invariant 4).
    * At most `max_inflight` samples are in flight; those that have begun go on before new ones
      start. A sample whose environment acts is not in flight, but has not ended either.
    * With ``on_stale="evict"`` a group with a member too old to be trained is evicted whole, unless
      all its members are scored: such a group is on its way to the buffer, which then evicts it. So
      no token is discarded twice.
    * Tokens that come back from an engine enter the ledger before anything else is done with them;
      those of a group that was dropped meanwhile are discarded with the group's reason.
    * An environment's answer counts only for the sample that it was asked about: what was dropped
      or began anew meanwhile takes no late answer.

Pure: no I/O, no clock, no ray, no torch. The simulator, the property tests and the rollout worker
run this same class. A decision costs O(log n) in the number of live samples.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ray_apr.config import PartialRolloutConfig
from ray_apr.core.exceptions import RolloutError
from ray_apr.core.ledger import DiscardReason
from ray_apr.core.messages import Generation
from ray_apr.core.sample import FinishReason, Prompt, Sample, SampleState
from ray_apr.core.user import GroupFilter, RewardResult, Step
from ray_apr.scheduling.filters import is_filtered
from ray_apr.scheduling.intake import Intake, SchedulerState
from ray_apr.scheduling.live import LiveGroup, LiveSample, TurnRules, transition
from ray_apr.scheduling.order import with_stops


class Actions(NamedTuple):
    """What is to be done now; the scheduler has noted it as done."""

    admit: Sequence[LiveGroup] = ()
    """Groups that were admitted; nothing is to be done for them."""
    reset: Sequence[LiveSample] = ()
    """Their environment is asked what comes first: `Scheduler.on_step`."""
    start: Sequence[LiveSample] = ()
    """They are in flight: `Scheduler.on_generation`, `on_retry` or `fail`."""
    abort: Sequence[LiveSample] = ()
    """Their generate calls are aborted; each still ends by its generation or error."""
    dropped: Sequence[LiveGroup] = ()
    """Groups that were dropped since the last tick; `LiveGroup.dropped` says why."""


class Scheduler(Intake):
    """Decides which groups and samples start, resume, stop and are dropped.

    An event raises `RolloutError` if the sample is in another state than it needs.

    Args:
        config: When samples are started, interrupted and dropped.
        batch_size: Samples of one step, a multiple of `group_size`.
        group_size: Samples of one prompt.
        max_inflight: Most samples in the engines at once.
        budgets: Response tokens of the samples of a prompt; cycled if they are fewer.
        policy_version: Version of the engines at the start; above 0 after a restore.
        turns: Rules of a run with an environment; None: each sample is one turn.
        keeps: Says of each scored group whether it may be trained; None keeps all.

    Raises:
        ConfigError: If a number is not positive or the batch is no multiple of the group.

    Example:
        >>> from ray_apr.config import PartialRolloutConfig
        >>> prompts = iter([Prompt(prompt_id="p", token_ids=(1, 2))])
        >>> scheduler = Scheduler(
        ...     PartialRolloutConfig(), batch_size=4, group_size=2, max_inflight=1,
        ...     budgets=lambda prompt: [16],
        ... )
        >>> actions = scheduler.tick(lambda: next(prompts, None))
        >>> [group.group_id for group in actions.admit], [s.sample_id for s in actions.start]
        (['p'], ['p-0'])
    """

    def __init__(
        self,
        config: PartialRolloutConfig,
        *,
        batch_size: int,
        group_size: int,
        max_inflight: int,
        budgets: Callable[[Prompt], Sequence[int]],
        policy_version: int = 0,
        turns: TurnRules | None = None,
        keeps: GroupFilter | None = None,
    ) -> None:
        super().__init__(
            config,
            batch_size=batch_size,
            group_size=group_size,
            max_inflight=max_inflight,
            policy_version=policy_version,
        )
        self._budgets = budgets
        self._turns = turns
        self._keeps = keeps
        self._resets: deque[LiveSample] = deque()
        self._to_abort: list[LiveSample] = []
        """Samples that ran when their group was dropped, until the next tick."""
        self._has_interrupted = False
        self._dropped: list[LiveGroup] = []

    def restore(
        self, state: SchedulerState, prompt_of: Callable[[str], Prompt]
    ) -> list[tuple[Sample, ...]]:
        """Go on with the samples of a checkpoint, before the first `tick`.

        What was in flight is interrupted, with the tokens that were known. Members that have ended
        are to be scored, those that await their environment asked about again.

        Args:
            state: Of a scheduler with the same group size.
            prompt_of: Gives the prompt of an id.

        Returns:
            Groups that are scored, which go to the buffer at once.
        """
        self._num_owed = state.num_owed
        again = [with_stops(prompt_of(i), state.num_stops) for i in state.retries]
        self._retries.restore(again, state.num_long_retries)
        scored = []
        for samples in state.handed_over:
            scored.append(self._hand_over(self.live.add_group(samples[0].prompt, samples)))
        for samples in state.groups:
            group = self.live.add_group(samples[0].prompt, samples)
            for live in group.members:
                if not (live.sample.segments or live.sample.environment_state):
                    self._begin(live)
            if group.is_complete and (kept := self._complete(group)):
                scored.append(kept)
        return scored

    # -- what to do ------------------------------------------------------------------------------

    def tick(self, next_prompt: Callable[[], Prompt | None], *, starts: bool = True) -> Actions:
        """Decide what to do now; to be called after each event.

        Args:
            next_prompt: Gives a new prompt; None if there is none now.
            starts: Whether the engines take calls; False while they drain or are away.
        """
        self.evict_stale()
        admitted: list[LiveGroup] = []
        for _ in range(self.room().num_groups):
            prompt = self._retries.next() or next_prompt()
            if prompt is None:
                break
            admitted.append(self.admit(prompt))
        resets: list[LiveSample] = []
        while self._resets:
            live = self._resets.popleft()
            if live.is_live:
                resets.append(live)
        started: list[LiveSample] = []
        if starts:
            started = list(iter(self.start_next, None))
            if self.keeps_tokens:
                self._to_abort += self.live.suspects.in_the_way(self.live.can_run)
            if not self._has_interrupted and self.is_held:
                self._has_interrupted = True  # until something starts, or the version changes
                self._to_abort += self.live.inflight.values()
        return Actions(admitted, resets, started, self.take_aborts(), self.take_dropped())

    def take_dropped(self) -> Sequence[LiveGroup]:
        """Groups that were dropped and that no tick has told."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def take_aborts(self) -> Sequence[LiveSample]:
        """Samples that run although their group was dropped, or that a full batch stops."""
        aborts, self._to_abort = self._to_abort, []
        return aborts

    def start_next(self) -> LiveSample | None:
        """Mark the next sample as in flight: those that have begun first.

        Returns:
            The sample; None while `max_inflight` is reached, nothing can run, or the batch is full.
        """
        queues = self.live
        if len(queues.inflight) >= self.max_inflight or self.is_held:
            return None
        live = queues.pop_runnable()
        if live is None and queues.held_back and not queues.inflight:
            queues.release()  # nothing else is left to run
            live = queues.pop_runnable()
        if live is not None:
            queues.start(live, self.policy_version)
            self._has_interrupted = False
        return live

    # -- what happened ---------------------------------------------------------------------------

    def on_generation(self, live: LiveSample, generation: Generation) -> Sample | None:
        """Take the tokens of a generate call.

        Returns:
            The sample, finished, interrupted, or awaiting its environment; None if its group was
            dropped meanwhile.

        Raises:
            RolloutError: If the sample is not in flight, or the tokens do not fit it.
        """
        new, ledger = generation.num_tokens, self.live.ledger
        if live.group.dropped is None:
            transition(live, "interrupted")  # in flight, whatever it ends as
        ledger.generated(new)
        if live.group.dropped is not None:
            ledger.discard(new, "interrupted", live.group.dropped)
            return None
        live.sample = sample = live.sample.append(generation, ends_turn=self._turns is not None)
        self.live.learn_version(live)
        if sample.finish_reason is not None:
            self.live.move(live, "finished")
        elif sample.awaits_step:
            self.live.move(live, "turn_ended")
        else:
            self._interrupt(live)
            self._after_interrupt(live)
        return sample

    def _interrupt(self, live: LiveSample) -> None:
        """A sample was stopped before its end; without any token it waits again, at the front."""
        self.live.move(live, "interrupted" if live.sample.num_generated else "returned")
        tail_round = self._config.tail_round
        if tail_round is not None and live.num_stops > 1:
            self.live.hold_back(live)
            if len(self.live.held_back) >= tail_round or self._is_aged(live):
                self.live.release()

    def _after_interrupt(self, live: LiveSample) -> None:
        """An interrupted sample is resumed, starts anew, or is given up."""
        if live.state is not SampleState.INTERRUPTED or self._config.after_interrupt == "resume":
            return
        if self._config.after_interrupt == "restart":
            self.live.restart(live)
            self._begin(live)
        else:
            self._drop(live.group, "surplus")

    def on_retry(self, live: LiveSample) -> None:
        """A live sample whose generate call failed may be started again; its tokens are kept."""
        begun_at = live.sample.oldest_version
        self.live.move(live, "returned" if begun_at is None else "interrupted")
        if self._config.restarts and begun_at not in (None, self.policy_version):
            self._after_interrupt(live)  # a version has passed since its first turn

    def on_step(
        self, live: LiveSample, asked: Sample, step: Step, token_ids: Sequence[int]
    ) -> Sample | None:
        """Take the answer of an environment.

        Args:
            live: The sample.
            asked: Its value that the environment was asked about.
            step: The answer.
            token_ids: What the policy reads next, encoded; nothing if the sample ends.

        Returns:
            The sample, ended or ready to go on; None if the answer comes too late.
        """
        if not self.is_current(live, asked):
            return None
        transition(live, "stepped")
        reason = self.finish_reason(asked, step)
        if reason is not None:
            live.sample = asked.finish(reason, state=step.state)
        else:
            live.sample = asked.observe(token_ids, state=step.state)
        if live.sample.finish_reason is not None:
            self.live.move(live, "finished")
        else:
            self.live.move(live, "stepped" if live.sample.num_generated else "begun")
        return live.sample

    def finish_reason(self, asked: Sample, step: Step) -> FinishReason | None:
        """How an environment's answer ends a sample; None where it goes on."""
        return (self._turns or TurnRules()).finish_reason(asked, step)

    def is_current(self, live: LiveSample, asked: Sample) -> bool:
        """Whether an environment that was asked about `asked` may still answer."""
        return live.is_live and live.sample is asked

    def on_reward(self, live: LiveSample, result: RewardResult) -> tuple[Sample, ...] | None:
        """Take the reward of a finished sample.

        Returns:
            The whole group if it is complete and not filtered out, which then leaves for the
            buffer; else None.

        Raises:
            RolloutError: If the filter raised.
        """
        if not live.is_live:
            return None
        self.live.move(live, "scored")
        live.sample = dataclasses.replace(
            live.sample, reward=result.reward, reward_metrics=result.metrics
        )
        return self._complete(live.group) if live.group.is_complete else None

    def _complete(self, group: LiveGroup) -> tuple[Sample, ...] | None:
        """A group is scored: it leaves for the buffer, or is filtered out."""
        zero_variance = self._config.filter_zero_variance
        if is_filtered(group.samples, self._keeps, zero_variance=zero_variance):
            if group.prompt.num_filtered < self._config.max_filter_retries:
                self._retries.after_filter(group.prompt)
                group.is_retried = True
            self._num_filtered += 1
            self._drop(group, "filtered")
            return None
        self._num_filtered = 0
        return self._hand_over(group)

    def _hand_over(self, group: LiveGroup) -> tuple[Sample, ...]:
        self.live.remove(group, "buffered")
        self._num_buffered += self._group_size
        self._num_handed += self._group_size
        return group.samples

    def fail(self, live: LiveSample, reason: DiscardReason = "failed", error: str = "") -> None:
        """Drop the group of a sample whose generation, step or reward failed for good."""
        if live.is_live:
            live.group.error = error
            self._drop(live.group, reason)

    def _drop(self, group: LiveGroup, reason: DiscardReason) -> None:
        """Drop a group whole; what runs of it is aborted at the next tick."""
        self._num_owed += 1
        group.dropped = reason
        self._dropped.append(group)
        self._to_abort += [live for live in group.members if live.state is SampleState.INFLIGHT]
        self.live.remove(group, reason)  # type: ignore[arg-type]

    def on_version(self, policy_version: int) -> None:
        """The engines have new weights; groups that became too old are dropped.

        Raises:
            RolloutError: If it is older than the last one.
        """
        if policy_version < self.policy_version:
            raise RolloutError(
                f"policy version went back from {self.policy_version} to {policy_version}"
            )
        if self._config.restarts:
            for live in [live for group in self.live.groups for live in group.members]:
                self._cut(live)
        self.policy_version = policy_version
        self._has_interrupted = False
        if any(self._is_aged(live) for live in self.live.held_back.values()):
            self.live.release()
        self.evict_stale()
        self._retries.begin_version()
        if self._retries.is_catching_up:
            for group in tuple(self.live.groups):
                if all(live.is_untried for live in group.members):
                    self._retries.put_off(group.prompt)
                    self.live.remove(group, "put_off")

    def _cut(self, live: LiveSample) -> None:
        """Where interruption leaves no tokens, what rests between turns takes none along either.

        What is in flight is left: it is aborted for the sync, or ends just before.
        """
        if live.is_live and live.sample.num_generated:
            if live.state in (SampleState.STEPPING, SampleState.READY):
                self.live.move(live, "cut")
            self._after_interrupt(live)

    def evict_stale(self) -> None:
        """Drop, whole, each group that can never be trained any more.

        A group is judged by its oldest token that is known here. With ``on_stale="mask"`` a group
        that still generates is never too old: its next tokens will be fresh.
        """
        if self._config.on_stale == "mask":
            return
        starts_anew = self._config.restarts and self._config.after_interrupt == "restart"
        group = self.live.oldest_group()
        while group is not None and self._is_stale(group):
            if starts_anew:
                self._retries.after_stop(group.prompt)
                group.is_retried = True
            self._drop(group, "stale")
            group = self.live.oldest_group()
