"""A scheduler that tests drive by ids: what engines and rewards would answer is made up here."""

from __future__ import annotations

from ray_apr.config import PartialRolloutConfig
from ray_apr.core.messages import Generation
from ray_apr.core.sample import FinishReason, Prompt, SampleState, Segment
from ray_apr.core.user import RewardResult
from ray_apr.scheduling.live import LiveSample
from ray_apr.scheduling.scheduler import Scheduler

BUDGET = 1000


def prompt(name: str) -> Prompt:
    """A prompt of this id."""
    return Prompt(prompt_id=name, token_ids=(1, 2))


def generation(
    version: int | None, num_tokens: int = 1, reason: FinishReason = FinishReason.ABORT
) -> Generation:
    """What a call returns: tokens of one version, or none where there is no version."""
    ids = (7,) * (0 if version is None else num_tokens)
    part = Segment(policy_version=version or 0, token_ids=ids, logprobs=(0.0,) * len(ids))
    return Generation(request_id="r", segments=(part,), finish_reason=reason)


def members(scheduler: Scheduler) -> list[LiveSample]:
    """All live samples, in order of admission."""
    return [live for group in scheduler.live.groups for live in group.members]


def sample_of(scheduler: Scheduler, sample_id: str) -> LiveSample:
    """The record of a live sample."""
    running = scheduler.live.inflight.get(sample_id)
    return running or next(live for live in members(scheduler) if live.sample_id == sample_id)


class Driven(Scheduler):
    """The scheduler, with samples and groups named by their ids."""

    def __init__(self, config: PartialRolloutConfig, **kwargs) -> None:
        super().__init__(config, **{"budgets": lambda prompt: [BUDGET], **kwargs})

    def __contains__(self, sample_id: str) -> bool:
        return any(live.sample_id == sample_id for live in members(self))

    def sample(self, sample_id: str) -> LiveSample:
        """The record of a live sample."""
        return sample_of(self, sample_id)

    @property
    def num_room(self) -> int:
        """Groups that may start."""
        return self.room().num_groups

    def admit_some(self, *names: object) -> None:
        """Admit these groups, or as many as may start."""
        for name in names or range(self.num_room):
            self.admit(prompt(f"g{name}"))

    def next_start(self) -> str | None:
        """The next sample that starts."""
        live = self.start_next()
        return None if live is None else live.sample_id

    def start_all(self) -> list[str]:
        """All that may start now, in order."""
        return list(iter(self.next_start, None))

    def state_of(self, sample_id: str) -> SampleState:
        """State of a live sample."""
        return self.sample(sample_id).state

    def interrupt(self, sample_id: str, version: int | None = 0, tokens: int = 1) -> None:
        """A call is aborted with so many new tokens; without a version with none."""
        self.on_generation(self.sample(sample_id), generation(version, tokens))

    def finish(self, sample_id: str, version: int = 0) -> LiveSample:
        """A call comes to its end with one token."""
        live = self.sample(sample_id)
        self.on_generation(live, generation(version, reason=FinishReason.STOP))
        return live

    def reward(self, sample_id: str, reward: float = 1.0) -> str | None:
        """A sample is scored; returns its group if that leaves for the buffer."""
        live = self.sample(sample_id)
        group = self.on_reward(live, RewardResult(reward=reward))
        return None if group is None else live.group.group_id

    def complete(self, sample_ids, version: int = 0) -> list[str]:
        """Finish and score; returns the groups that left for the buffer."""
        handed = []
        for sample_id in sample_ids:
            self.finish(sample_id, version)
            group_id = self.reward(sample_id)
            handed += [] if group_id is None else [group_id]
        return handed

    def full_aborts(self) -> list[str]:
        """What a tick that admits nothing aborts."""
        return [live.sample_id for live in self.tick(lambda: None).abort]

    def drops(self, happen) -> list[str]:
        """Groups that are gone after a call."""
        before = [group.group_id for group in self.live.groups]
        happen()
        after = {group.group_id for group in self.live.groups}
        return [group_id for group_id in before if group_id not in after]
