"""The record of a live sample, the record of its group, and the table of what may happen to them.

Invariants:
    * A live sample is in exactly one state. What may happen to it is a row of `TRANSITIONS`; an
      event that does not fit the state raises.
    * A sample gets tokens through the methods of `Sample` alone, which keep ids, log-probs,
      versions, masks and the budget in step (invariant 5).

Pure: no I/O, no clock, no ray, no torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ray_apr.core.exceptions import RolloutError
from ray_apr.core.ledger import DiscardReason
from ray_apr.core.sample import FinishReason, Prompt, Sample, SampleState
from ray_apr.core.user import Step

_S = SampleState
UNFINISHED = (_S.WAITING, _S.INFLIGHT, _S.INTERRUPTED, _S.STEPPING, _S.READY)
"""States of samples that have not ended; the ledger holds their tokens as interrupted."""
_LIVE = (*UNFINISHED, _S.FINISHED, _S.SCORED)

Event = Literal[
    "started", "interrupted", "returned", "turn_ended", "finished", "resets", "begun", "stepped",
    "cut", "restarted", "scored", "buffered", "stale", "surplus", "put_off", "filtered", "failed",
    "poison",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Transition:
    """A row of the table."""

    sources: tuple[SampleState, ...]
    target: SampleState
    tokens: Literal["pending", "handed_over"] | DiscardReason | None = None
    """Where the ledger moves the sample's tokens: to another place, to the buffer, or to the
    discarded ones with this reason; None leaves them."""


TRANSITIONS: Mapping[Event, Transition] = {
    # what happens to one sample
    "started": Transition((_S.WAITING, _S.INTERRUPTED, _S.READY), _S.INFLIGHT),
    "interrupted": Transition((_S.INFLIGHT,), _S.INTERRUPTED),
    "returned": Transition((_S.INFLIGHT,), _S.WAITING),  # interrupted without a token
    "turn_ended": Transition((_S.INFLIGHT,), _S.STEPPING),
    "finished": Transition((_S.INFLIGHT, _S.STEPPING), _S.FINISHED, "pending"),
    "resets": Transition((_S.WAITING,), _S.STEPPING),  # its environment speaks first
    "begun": Transition((_S.STEPPING,), _S.WAITING),
    "stepped": Transition((_S.STEPPING,), _S.READY),
    "cut": Transition((_S.STEPPING, _S.READY), _S.INTERRUPTED),  # between turns, to keep no tokens
    "restarted": Transition((_S.INTERRUPTED,), _S.WAITING, "restarted"),
    "scored": Transition((_S.FINISHED,), _S.SCORED),
    # what happens to a whole group
    "buffered": Transition((_S.SCORED,), _S.BUFFERED, "handed_over"),
    "stale": Transition(_LIVE, _S.EVICTED, "stale"),
    "surplus": Transition(_LIVE, _S.EVICTED, "surplus"),
    "put_off": Transition((_S.WAITING,), _S.EVICTED),
    "filtered": Transition((_S.SCORED,), _S.FILTERED, "filtered"),
    "failed": Transition(_LIVE, _S.FAILED, "failed"),
    "poison": Transition(_LIVE, _S.FAILED, "poison"),
}


def transition(live: LiveSample, event: Event) -> Transition:
    """The row of an event that happens to a sample.

    Raises:
        RolloutError: If the sample is in another state than the event needs.
    """
    row = TRANSITIONS[event]
    if live.state not in row.sources:
        wanted = " or ".join(state.value for state in row.sources)
        name = live.sample.sample_id
        raise RolloutError(f"{event}({name!r}): the sample is {live.state.value}, not {wanted}")
    return row


def resting_state(sample: Sample) -> SampleState:
    """The state of a sample for which no call is made, as after a restore."""
    if sample.finish_reason is not None:
        return _S.FINISHED if sample.reward is None else _S.SCORED
    if sample.awaits_step:
        return _S.STEPPING
    if not sample.num_generated:
        return _S.WAITING
    return _S.INTERRUPTED if sample.segments[-1].is_generated else _S.READY


@dataclass(slots=True, eq=False)
class LiveGroup:
    """The samples of one prompt, from admission until they are handed over or dropped together."""

    group_id: str
    prompt: Prompt
    order: int
    """Grows with admission; unique among groups and samples."""
    members: list[LiveSample] = field(default_factory=list)
    """Empty once it has left."""
    left: tuple[Sample, ...] = ()
    """Its samples as they were when it left."""
    num_scored: int = 0
    oldest_version: int | None = None
    """Version of the oldest token that is known; None while there is none."""
    started_version: int | None = None
    """Version of the engines when its first member started: none of its tokens is older."""
    is_live: bool = True
    dropped: DiscardReason | None = None
    """Why it was dropped, for tokens that are still on their way."""
    is_retried: bool = False
    """Whether its prompt is tried again, as it was dropped."""
    error: str = ""
    """What failed, in a line, if it was dropped for that."""

    @property
    def age_version(self) -> int | None:
        """Version of the oldest token, as far as it is known; None before the start."""
        return self.started_version if self.oldest_version is None else self.oldest_version

    @property
    def samples(self) -> tuple[Sample, ...]:
        """The samples as they are now, or were when the group left."""
        return tuple(live.sample for live in self.members) if self.is_live else self.left

    def let_go(self) -> None:
        """The group has left: its members, which late tokens find it by, are no longer found here.

        A group and its members would be a circle, which only a full collection of garbage finds:
        all tokens of a long run would wait for one.
        """
        self.left = tuple(live.sample for live in self.members)
        self.members = []

    @property
    def is_complete(self) -> bool:
        """Whether every member has its reward."""
        return self.num_scored == len(self.members)

    @property
    def waits_for_reward(self) -> bool:
        """Whether all members have ended and a reward is missing."""
        ended = (_S.FINISHED, _S.SCORED)
        return not self.is_complete and all(live.state in ended for live in self.members)


@dataclass(slots=True, eq=False)
class LiveSample:
    """All that is known of a sample until its group leaves."""

    sample: Sample
    """Its tokens, text and reward; replaced by a new value when these change."""
    group: LiveGroup
    order: int
    """Grows with admission; unique."""
    state: SampleState = _S.WAITING
    request_id: str = ""
    """Of its generate call under way; empty while there is none. Kept by whoever makes it."""
    num_failures: int = 0
    """Generate calls that have failed."""
    trial_s: float = 0.0
    """Seconds that it runs yet before a death of its engine is no longer laid to it."""
    cut_s: float = 0.0
    """Seconds after which its next call on trial is cut, if its last one brought no token."""
    num_stops: int = 0
    """Times that it was stopped with tokens, whether it kept them or not."""
    queued: int = 0
    """Grows each time that a sample which has begun waits to go on; unique."""

    @property
    def sample_id(self) -> str:
        """Its id."""
        return self.sample.sample_id

    @property
    def is_live(self) -> bool:
        """Whether its group was neither handed over nor dropped."""
        return self.group.is_live

    @property
    def is_untried(self) -> bool:
        """Whether nothing is lost if it begins later under another id: no token, and no engine that
        died under it."""
        return self.state is _S.WAITING and not self.sample.num_deaths

    def note(self, **fields: Any) -> Sample:
        """Note what becomes known of it, as a decoded text; returns the sample with it."""
        self.sample = dataclasses.replace(self.sample, **fields)
        return self.sample


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
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
