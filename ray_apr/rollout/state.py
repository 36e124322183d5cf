"""Dispatcher, store and ledger in step: what happens to a sample happens in all three at once.

Invariants, kept by `RolloutState`:
    * Tokens that come back from an engine enter the ledger before anything else is done with them.
    * Tokens of a group that was dropped are discarded with the group's reason, those that arrive
      after the drop included.
    * A group leaves whole: to the buffer when all of its members are scored, or dropped.
    * An environment's answer counts only for the sample that it was asked about: what was dropped
      or began anew meanwhile takes no late answer.

Pure: no I/O, no clock, no ray, no torch.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ray_apr.config import PartialRolloutConfig
from ray_apr.core.ledger import DiscardReason, LedgerSnapshot, Place, TokenLedger
from ray_apr.exceptions import RolloutError
from ray_apr.protocols import GroupFilter
from ray_apr.rollout.dispatcher import Dispatcher
from ray_apr.rollout.store import SampleStore
from ray_apr.types import (
    FinishReason,
    Generation,
    Prompt,
    RewardResult,
    Sample,
    SampleState,
    Step,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRules:
    """How samples go from turn to turn in a run with an environment."""

    resets: bool = False
    """The environment says what comes before the first turn."""
    max_turns: int | None = None
    """Most turns of a sample; None leaves it to the token budget."""

    def finish_reason(self, asked: Sample, step: Step) -> FinishReason | None:
        """How the answer to the last turn of `asked` ends it; None where it goes on."""
        if step.done:
            return FinishReason.STOP
        is_last = self.max_turns is not None and asked.num_turns >= self.max_turns
        return FinishReason.LENGTH if is_last else None


class RolloutState:
    """The samples of a rollout worker, from admission to the buffer.

    Args:
        dispatcher: Decides which sample runs next.
        config: What becomes of samples that are interrupted, and of groups without a signal.
        turns: Rules of a run with an environment; None: each sample is one turn.
        keeps: Says of each scored group whether it may be trained; None keeps all.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        config: PartialRolloutConfig,
        turns: TurnRules | None = None,
        keeps: GroupFilter | None = None,
    ) -> None:
        self.dispatcher = dispatcher
        self._config = config
        self._keeps = keeps
        self._turns = turns
        self._resets: deque[str] = deque()
        """Samples that wait for their environment to begin."""
        self._retries: deque[Prompt] = deque()
        """Prompts to be tried again at once."""
        self._requeued: deque[Prompt] = deque()
        """Prompts that full batches stopped twice; they wait for a round of their own."""
        self._store = SampleStore()
        self._ledger = TokenLedger()
        self._inflight: set[str] = set()
        self._surplus: tuple[str, ...] = ()
        self._dropped: dict[str, DiscardReason] = {}
        """Samples that were in flight when their group was dropped, until their tokens arrive."""

    def __contains__(self, sample_id: str) -> bool:
        """Whether the sample is live: neither handed over nor dropped."""
        return sample_id in self._store

    def live_groups(self) -> Iterator[str]:
        """Ids of the groups that are neither handed over nor dropped."""
        return iter(dict.fromkeys(sample.group_id for sample in self._store))

    def pending_prompts(self) -> Iterator[str]:
        """Ids of the prompts that are neither handed over nor dropped for good."""
        yield from self.live_groups()
        yield from (prompt.prompt_id for prompt in (*self._retries, *self._requeued))

    def ledger(self) -> LedgerSnapshot:
        """Where the tokens are."""
        return self._ledger.snapshot()

    def next_retry(self) -> Prompt | None:
        """A prompt whose group was dropped and that is to be tried again now; None: a new one."""
        if self._requeued and self.dispatcher.in_tail_round:
            return self._requeued.popleft()
        return self._retries.popleft() if self._retries else None

    def admit(
        self, prompt: Prompt, *, group_size: int, max_response_tokens: int | Sequence[int]
    ) -> None:
        """Take a new group in; its samples wait to be started.

        Args:
            prompt: What they answer.
            group_size: How many they are.
            max_response_tokens: The budget of each, or a list of budgets that is cycled.
        """
        group_id = prompt.prompt_id
        budgets = (
            (max_response_tokens,) if isinstance(max_response_tokens, int) else max_response_tokens
        )
        samples = [
            Sample(
                sample_id=f"{group_id}-{i}",
                group_id=group_id,
                prompt=prompt,
                max_response_tokens=budgets[i % len(budgets)],
            )
            for i in range(group_size)
        ]
        self.dispatcher.add_group(group_id, [s.sample_id for s in samples])
        for sample in samples:
            self._store.add(sample)
            self._begin(sample.sample_id)

    def _begin(self, sample_id: str) -> None:
        """A sample without a token can start, or has to wait until its environment is reset."""
        if self._turns is not None and self._turns.resets:
            self.dispatcher.on_reset(sample_id)
            self._resets.append(sample_id)

    def next_reset(self) -> Sample | None:
        """A sample whose environment is to be reset now: `on_step`; None if there is none."""
        while self._resets:
            sample_id = self._resets.popleft()
            if sample_id in self._store:
                return self._store.get(sample_id)
        return None

    def start_next(self) -> Sample | None:
        """Mark the next sample as in flight; None when nothing may run now."""
        sample_id = self.dispatcher.next_start()
        if sample_id is None:
            return None
        self._inflight.add(sample_id)
        return self._store.get(sample_id)

    def on_generation(self, sample_id: str, generation: Generation) -> Sample | None:
        """Take the tokens of a generate call.

        Returns:
            The sample, finished, interrupted, or awaiting its environment; None if its group was
            dropped meanwhile.

        Raises:
            RolloutError: If the tokens do not fit the sample.
        """
        new = generation.num_tokens
        self._inflight.discard(sample_id)
        self._ledger.generated(new)
        if sample_id in self._dropped:
            self._ledger.discard(new, "pending", self._dropped.pop(sample_id))
            return None
        held = self._store.get(sample_id).num_generated
        sample = self._store.append(sample_id, generation, ends_turn=self._turns is not None)
        if sample.finish_reason is not None:
            self._ledger.ended(held)
            self.dispatcher.on_finished(sample_id, oldest_version=sample.oldest_version)
            return sample
        self._ledger.interrupted(new)
        if sample.awaits_step:
            self.dispatcher.on_turn_ended(
                sample_id, oldest_version=sample.oldest_version, num_tokens=sample.num_tokens
            )
        else:
            self.dispatcher.on_interrupted(
                sample_id, oldest_version=sample.oldest_version, num_tokens=sample.num_tokens
            )
            self._after_interrupt(sample)
        return sample

    def is_current(self, asked: Sample) -> bool:
        """Whether an environment that was asked about `asked` may still answer."""
        sample_id = asked.sample_id
        return sample_id in self._store and self._store.get(sample_id) is asked

    def on_step(self, asked: Sample, step: Step, token_ids: Sequence[int]) -> Sample | None:
        """Take the answer of an environment.

        Args:
            asked: The very sample that the environment was asked about, as this state gave it.
            step: The answer.
            token_ids: What the policy reads next, encoded.

        Returns:
            The sample, ended or ready to go on; None if the answer comes too late.
        """
        if not self.is_current(asked):
            return None
        sample_id = asked.sample_id
        reason = (self._turns or TurnRules()).finish_reason(asked, step)
        if reason is not None:
            sample = self._store.finish(sample_id, reason, state=step.state)
        else:
            sample = self._store.observe(sample_id, token_ids, state=step.state)
        if sample.finish_reason is None:
            self.dispatcher.on_stepped(sample_id)
        else:
            self._ledger.ended(sample.num_generated)
            self.dispatcher.on_done(sample_id)
        return sample

    def _after_interrupt(self, sample: Sample) -> None:
        """An interrupted sample is resumed, starts anew, or is given up."""
        sample_id = sample.sample_id
        if not sample.num_generated or self._config.after_interrupt == "resume":
            return
        if self._config.after_interrupt == "restart":
            self._ledger.discard(sample.num_generated, "interrupted", "restarted")
            self._store.restart(sample_id)
            self.dispatcher.on_restart(sample_id)
            self._begin(sample_id)
        else:
            self._surplus += self._drop(self.dispatcher.on_given_up(sample_id), "surplus")

    def take_surplus(self) -> tuple[str, ...]:
        """Samples that run although their group was given up; the caller aborts them."""
        surplus, self._surplus = self._surplus, ()
        return surplus

    def on_generation_error(self, sample_id: str) -> bool:
        """A generate call failed; the sample stays as it was before the call.

        Returns:
            False if its group was dropped meanwhile.
        """
        self._inflight.discard(sample_id)
        return self._dropped.pop(sample_id, None) is None

    def on_retry(self, sample_id: str) -> None:
        """A live sample whose generate call failed may be started again."""
        self.dispatcher.on_retry(sample_id)
        sample = self._store.get(sample_id)
        begun_at = sample.oldest_version
        if self._config.restarts and begun_at not in (None, self.dispatcher.policy_version):
            self._after_interrupt(sample)  # a version has passed since its first turn

    def set_turn_text(self, sample_id: str, text: str) -> Sample:
        """Note the decoded last turn of a sample that awaits its environment."""
        return self._store.replace(dataclasses.replace(self._store.get(sample_id), turn_text=text))

    def set_text(self, sample_id: str, text: str) -> Sample:
        """Note the decoded response of a finished sample."""
        return self._store.replace(
            dataclasses.replace(self._store.get(sample_id), response_text=text)
        )

    def on_reward(self, sample_id: str, result: RewardResult) -> tuple[Sample, ...] | None:
        """Take the reward of a finished sample.

        Returns:
            The whole group if it is complete and not filtered out, which then leaves for the
            buffer; else None.

        Raises:
            RolloutError: If the filter raised.
        """
        if sample_id not in self._store:
            return None
        sample = self._store.get(sample_id)
        self._store.replace(
            dataclasses.replace(sample, reward=result.reward, reward_metrics=result.metrics)
        )
        group_id = self.dispatcher.on_scored(sample_id)
        if group_id is None:
            return None
        members = self.dispatcher.members_of(group_id)
        if self._is_filtered([self._store.get(m) for m in members]):
            self._retry(self._store.get(sample_id).prompt, self._config.max_filter_retries)
            self._drop(self.dispatcher.on_filtered(group_id), "filtered")
            return None
        samples = tuple(self._store.pop(members))
        self.dispatcher.on_buffered(group_id)
        self._ledger.hand_over(sum(s.num_generated for s in samples))
        return samples

    def _is_filtered(self, group: Sequence[Sample]) -> bool:
        """Whether all rewards of a group are equal, so that all its advantages are zero; or the
        user's filter drops it."""
        if self._config.filter_zero_variance and len({sample.reward for sample in group}) == 1:
            return True
        if self._keeps is None:
            return False
        try:
            return not self._keeps(group)
        except Exception as error:
            name = group[0].group_id
            raise RolloutError(f"the group filter raised for group {name}: {error!r}") from error

    def _retry(self, prompt: Prompt, max_retries: int) -> None:
        """Try a prompt again at once."""
        if prompt.num_retries < max_retries:
            self._retries.append(_again(prompt))

    def fail(self, sample_id: str) -> tuple[str, ...]:
        """Drop the group of a sample that failed for good.

        Returns:
            Ids of its members that still run, to be aborted.
        """
        if sample_id not in self._store:
            return ()
        return self._drop(self.dispatcher.on_failed(sample_id), "failed")

    def on_version(self, policy_version: int) -> tuple[str, ...]:
        """The engines have new weights; groups that became too old are dropped.

        Returns:
            Ids of members that still run, to be aborted.
        """
        if self._config.restarts:
            for sample in self._store:
                self._cut(sample)
        stale = self.dispatcher.on_version(policy_version)
        running = self.take_surplus() + self._drop_groups(stale)
        self.dispatcher.begin_round(len(self._requeued))
        if self.dispatcher.in_tail_round:
            self._put_off_what_has_not_begun()
        return running

    def _put_off_what_has_not_begun(self) -> None:
        for group_id in tuple(self.live_groups()):
            group = self._store.group(group_id)
            if all(self.dispatcher.state_of(s.sample_id) is SampleState.WAITING for s in group):
                self._retries.append(group[0].prompt)
                self._store.pop(self.dispatcher.on_put_off(group_id))

    def _cut(self, sample: Sample) -> None:
        """Where interruption leaves no tokens, what rests between turns takes none along either.

        What is in flight is left: it is aborted for the sync, or ends just before.
        """
        sample_id = sample.sample_id
        if sample_id not in self._store or not sample.num_generated:
            return  # given up with a sibling, or nothing to lose
        state = self.dispatcher.state_of(sample_id)
        if state in (SampleState.STEPPING, SampleState.READY):
            self.dispatcher.on_cut(sample_id)
        elif state is not SampleState.INTERRUPTED:
            return
        self._after_interrupt(sample)

    def evict_stale(self) -> tuple[str, ...]:
        """Drop groups that turned out to be too old; returns members that still run."""
        return self._drop_groups(self.dispatcher.evict_stale())

    def _drop_groups(self, group_ids: Iterable[str]) -> tuple[str, ...]:
        groups = [self._store.group(g) for g in group_ids]
        if self._config.restarts and self._config.after_interrupt == "restart":
            for prompt in (samples[0].prompt for samples in groups):
                (self._requeued if prompt.num_retries else self._retries).append(_again(prompt))
        members = [s.sample_id for samples in groups for s in samples]
        return self._drop(members, "stale")

    def _drop(self, members: Sequence[str], reason: DiscardReason) -> tuple[str, ...]:
        for sample in self._store.pop(members):
            place: Place = "interrupted" if sample.finish_reason is None else "pending"
            self._ledger.discard(sample.num_generated, place, reason)
        running = tuple(m for m in members if m in self._inflight)
        self._dropped.update(dict.fromkeys(running, reason))
        return running


def _again(prompt: Prompt) -> Prompt:
    """The same prompt for another try, under an id of its own."""
    number, name = prompt.num_retries + 1, prompt.prompt_id.partition("~")[0]
    return dataclasses.replace(prompt, prompt_id=f"{name}~{number}", num_retries=number)
