"""Intake: how groups come in, of new prompts, of prompts tried again, and of a checkpoint.

Invariants, kept by `Intake`:
    * A group comes in whole, each sample in the state that its tokens say.
    * What `state` gives is all that a run has under way before the buffer, but for the calls
      themselves. Nothing of it changes later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ray_apr.core.sample import Prompt, Sample
from ray_apr.scheduling.limits import Limits
from ray_apr.scheduling.live import LiveGroup, LiveSample, TurnRules


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerState:
    """What a checkpoint has of a scheduler; limits and counts follow from it."""

    groups: tuple[tuple[Sample, ...], ...] = ()
    """Samples of each live group, with their tokens."""
    handed_over: tuple[tuple[Sample, ...], ...] = ()
    """Samples of each group that was handed to the buffer and is neither trained nor evicted; the
    scheduler does not know them."""
    retries: tuple[str, ...] = ()
    """Ids of the prompts that are to be tried again."""
    num_long_retries: int = 0
    """How many of these, the last ones, wait for a round of their own."""
    num_stops: Mapping[str, int] = field(default_factory=dict)
    """By the id of a live group or of a prompt to be tried again: how many of its tries ended as a
    full batch stopped it, where any did."""
    num_owed: int = 0
    """Groups that were dropped and not yet replaced."""


class Intake(Limits):
    """The part of the scheduler through which groups come in; see there for the arguments."""

    _budgets: Callable[[Prompt], Sequence[int]]
    _turns: TurnRules | None
    suspicion: Callable[[Prompt], tuple[int, float]] = staticmethod(lambda prompt: (0, 0.0))
    """Deaths in a row that the samples of a prompt begin with, and their `LiveSample.trial_s`."""
    _resets: deque[LiveSample]
    """Samples whose environment speaks first, until the next tick."""

    def admit(self, prompt: Prompt) -> LiveGroup:
        """Take in the group of a new prompt; `room` says how many.

        Raises:
            RolloutError: If the prompt is live already.
        """
        budgets, group_id = self._budgets(prompt), prompt.prompt_id
        num_deaths, trial_s = self.suspicion(prompt)
        samples = [
            Sample(
                sample_id=f"{group_id}-{i}",
                group_id=group_id,
                prompt=prompt,
                max_response_tokens=budgets[i % len(budgets)],
                num_deaths=num_deaths,
            )
            for i in range(self._group_size)
        ]
        group = self.live.add_group(prompt, samples)
        self._num_owed = max(0, self._num_owed - 1)
        for live in group.members:
            live.trial_s = trial_s
            self._begin(live)
        return group

    def _begin(self, live: LiveSample) -> None:
        """A sample without a token can start, or has to wait until its environment is reset."""
        if self._turns is not None and self._turns.resets:
            self.live.move(live, "resets")
            self._resets.append(live)

    def forget(self, is_forgotten: Callable[[Prompt], bool]) -> list[Prompt]:
        """Try some prompts not again whose groups were dropped; returns them."""
        return self._retries.forget(is_forgotten)

    def state(self, *, with_groups: bool = True) -> SchedulerState:
        """What a checkpoint has of this scheduler (`Scheduler.restore`)."""
        groups = self.live.groups if with_groups else ()
        prompts = [*self._retries, *(group.prompt for group in self.live.groups)]
        return SchedulerState(
            groups=tuple(group.samples for group in groups),
            retries=tuple(prompt.prompt_id for prompt in self._retries),
            num_long_retries=self._retries.num_long,
            num_stops={p.prompt_id: p.num_stops for p in prompts if p.num_stops},
            num_owed=self._num_owed,
        )
