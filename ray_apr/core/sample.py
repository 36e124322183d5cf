"""One prompt and one response: frozen, slotted, free of torch and ray.

Invariants:
    * A segment's ids, log-probs and supports have the same length; segments are in order of
      generation, and their policy versions never decrease.
    * Tokens enter a sample through `Sample.append` (generated) and `Sample.observe` (said by an
      environment) alone, which keep ids, log-probs, versions, masks and the budget in step. Prompt
      and response never mix.
    * Ages and the token ledger know generated tokens only; the budget counts observed ones, too.
    * Token ids go in and come out as ids: nothing here decodes or encodes text.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from ray_apr.core.exceptions import RolloutError
from ray_apr.core.packed import LogProbs, TokenIds, packed

if TYPE_CHECKING:
    from ray_apr.core.messages import Generation


class SampleState(StrEnum):
    """Where a sample is: WAITING -> INFLIGHT <-> INTERRUPTED -> FINISHED -> ... -> TRAINED.

    With an environment a turn goes INFLIGHT -> STEPPING -> READY -> INFLIGHT.
    """

    WAITING = "waiting"
    INFLIGHT = "inflight"
    INTERRUPTED = "interrupted"
    STEPPING = "stepping"
    """Its environment acts: a tool runs, and no engine holds the sample."""
    READY = "ready"
    """Its environment has answered; the next turn can start."""
    FINISHED = "finished"
    SCORED = "scored"
    BUFFERED = "buffered"
    TRAINED = "trained"
    EVICTED = "evicted"
    FILTERED = "filtered"
    FAILED = "failed"


class FinishReason(StrEnum):
    """Why one generate call ended. ABORT means that the sample can be resumed.

    A sample ends by STOP, or by LENGTH when its budget or its turns are spent.
    """

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Tokens made under one policy version, as the engine attests it; or tokens observed."""

    policy_version: int
    """Of observed tokens: that of the generated ones beside them, so that no order is broken."""
    token_ids: Sequence[int]
    """Kept as `packed.TokenIds`, and `logprobs` as `packed.LogProbs`."""
    logprobs: Sequence[float]
    """Natural log-probabilities of `token_ids` under the sampling policy, same length."""
    is_generated: bool = True
    """False for what an environment said: context of the policy, never trained."""
    support: tuple[bytes, ...] = ()
    """Of each token the ids that could be drawn in its place, itself included, as 32-bit integers
    (`pack_ids`); none if all of the vocabulary could."""

    def __post_init__(self) -> None:
        for name, kind in (("token_ids", TokenIds), ("logprobs", LogProbs)):
            try:
                object.__setattr__(self, name, packed(getattr(self, name), kind))
            except (TypeError, OverflowError) as error:
                raise RolloutError(
                    f"{name} of a segment cannot be kept: {error}; an engine gives an id of 32 "
                    "bits and a log-prob for each token"
                ) from error
        if len(self.token_ids) != len(self.logprobs):
            raise RolloutError(
                f"segment has {len(self.token_ids)} token ids and {len(self.logprobs)} log-probs"
            )
        if self.support and len(self.token_ids) != len(self.support):
            raise RolloutError(
                f"segment has {len(self.token_ids)} token ids and {len(self.support)} supports"
            )

    def up_to(self, num_tokens: int) -> Segment:
        """The first tokens alone."""
        return dataclasses.replace(
            self,
            token_ids=self.token_ids[:num_tokens],
            logprobs=self.logprobs[:num_tokens],
            support=self.support[:num_tokens],
        )

    def beyond(self, num_tokens: int) -> Segment:
        """The tokens after the first ones alone."""
        return dataclasses.replace(
            self,
            token_ids=self.token_ids[num_tokens:],
            logprobs=self.logprobs[num_tokens:],
            support=self.support[num_tokens:],
        )


def pack_ids(ids: Iterable[int]) -> bytes:
    """Token ids as 32-bit integers in the machine's order, for `Segment.support`."""
    return TokenIds.of(ids).data


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A task to sample from."""

    prompt_id: str
    """Unique in a run, e.g. ``"e0-17"``: epoch and position in the epoch's order."""
    token_ids: tuple[int, ...]
    row: Mapping[str, Any] = field(default_factory=dict)
    """The dataset's row, for the reward function."""
    num_filtered: int = 0
    """Times that a group of this prompt was filtered and tried again."""
    num_stops: int = 0
    """Times that a full batch stopped a group of this prompt, which was tried again."""

    @property
    def num_retries(self) -> int:
        """Times that this prompt was tried again."""
        return self.num_filtered + self.num_stops


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One prompt and one response, complete or not."""

    sample_id: str
    group_id: str
    prompt: Prompt
    max_response_tokens: int
    """Budget of the whole response, in tokens; a resumed sample gets what remains."""
    segments: tuple[Segment, ...] = ()
    finish_reason: FinishReason | None = None
    num_interruptions: int = 0
    num_deaths: int = 0
    """Engines in a row that died while a call of it ran there (`scheduling.suspects`)."""
    num_turns: int = 0
    """Turns that the policy has ended; only counted in a run with an environment."""
    awaits_step: bool = False
    """Whether its last turn has ended and the environment has not answered yet."""
    environment_state: Mapping[str, Any] = field(default_factory=dict)
    """What the environment wants to know at its next step (`Step.state`)."""
    turn_text: str | None = None
    """The last turn, decoded for the environment's step; never encoded again. Of one that ended by
    itself what was generated of it."""
    response_text: str | None = None
    """Decoded after the end, for the reward function; never encoded again."""
    reward: float | None = None
    reward_metrics: Mapping[str, float] = field(default_factory=dict)
    """What the reward told beside its number (`RewardResult.metrics`)."""

    @property
    def row(self) -> Mapping[str, Any]:
        """The prompt's row of the dataset, for the reward function."""
        return self.prompt.row

    @property
    def num_tokens(self) -> int:
        """Response tokens so far, generated and observed."""
        return sum(len(s.token_ids) for s in self.segments)

    @property
    def num_generated(self) -> int:
        """Response tokens that an engine made: those that the ledger counts."""
        return sum(len(s.token_ids) for s in self.segments if s.is_generated)

    @property
    def remaining_budget(self) -> int:
        """Response tokens that may still follow, generated or observed."""
        return self.max_response_tokens - self.num_tokens

    @property
    def response_ids(self) -> tuple[int, ...]:
        """Token ids of the response, in order."""
        return tuple(itertools.chain.from_iterable(s.token_ids for s in self.segments))

    @property
    def turn_ids(self) -> tuple[int, ...]:
        """Token ids of the last turn: what was generated since the last observation."""
        last = itertools.takewhile(lambda s: s.is_generated, reversed(self.segments))
        return tuple(itertools.chain.from_iterable(s.token_ids for s in reversed(tuple(last))))

    @property
    def behavior_logprobs(self) -> tuple[float, ...]:
        """Log-prob of each response token under the policy that sampled it; 0.0 if observed."""
        return tuple(itertools.chain.from_iterable(s.logprobs for s in self.segments))

    @property
    def support(self) -> tuple[bytes, ...]:
        """Ids that could be drawn at each response token, see `Segment.support`; of observed tokens
        nothing. Empty if all of the vocabulary could be drawn."""
        if not any(s.support for s in self.segments):
            return ()
        return tuple(
            itertools.chain.from_iterable(
                s.support or (b"",) * len(s.token_ids) for s in self.segments
            )
        )

    @property
    def token_versions(self) -> tuple[int, ...]:
        """Policy version of each response token; see `Segment.policy_version`."""
        return tuple(
            itertools.chain.from_iterable(
                [s.policy_version] * len(s.token_ids) for s in self.segments
            )
        )

    @property
    def oldest_version(self) -> int | None:
        """Policy version of the first generated token; None while there is none."""
        return next((s.policy_version for s in self.segments if s.is_generated), None)

    @property
    def newest_version(self) -> int | None:
        """Policy version of the last generated token; None while there is none."""
        return next((s.policy_version for s in reversed(self.segments) if s.is_generated), None)

    def loss_mask(self, oldest_version: int | None = None) -> tuple[bool, ...]:
        """Which response tokens may enter the loss: generated ones, within the staleness bound.

        Args:
            oldest_version: Version of the oldest token that may be trained; None takes them all.
        """
        return tuple(
            itertools.chain.from_iterable(
                [s.is_generated and (oldest_version is None or s.policy_version >= oldest_version)]
                * len(s.token_ids)
                for s in self.segments
            )
        )

    def append(self, generation: Generation, *, ends_turn: bool = False) -> Sample:
        """Return this sample with the tokens of one more generate call.

        Neighbouring segments of one version are merged. An aborted call leaves the sample
        unfinished, unless its budget is spent.

        Args:
            generation: What the engine made.
            ends_turn: STOP ends a turn, and not the sample: an environment answers next.

        Raises:
            RolloutError: If the sample has ended or awaits its environment, the budget is exceeded,
                or versions decrease.
        """
        self._check_open()
        if self.awaits_step:
            raise RolloutError(f"sample {self.sample_id} awaits its environment, not an engine")
        if generation.num_tokens > self.remaining_budget:
            raise RolloutError(
                f"sample {self.sample_id} got {generation.num_tokens} tokens with "
                f"{self.remaining_budget} left in its budget of {self.max_response_tokens}"
            )
        segments = _merge((*self._dated(generation), *generation.segments), self.sample_id)
        aborted = generation.finish_reason is FinishReason.ABORT
        reason: FinishReason | None = None if aborted else generation.finish_reason
        if aborted and generation.num_tokens == self.remaining_budget:
            aborted, reason = False, FinishReason.LENGTH
        turn_ended = ends_turn and reason is FinishReason.STOP
        return dataclasses.replace(
            self,
            segments=segments,
            finish_reason=None if turn_ended else reason,
            num_interruptions=self.num_interruptions + (aborted and generation.num_tokens > 0),
            num_turns=self.num_turns + (ends_turn and not aborted),
            awaits_step=turn_ended,
        )

    def observe(
        self, token_ids: Sequence[int] = (), *, state: Mapping[str, Any] | None = None
    ) -> Sample:
        """Return this sample with what its environment said after the last turn, or before the
        first one.

        Observed tokens are context: not trained, without a log-prob and without an age. Where they
        leave no room for another token, none is added and the sample ends by LENGTH.

        Args:
            token_ids: What the policy reads before it goes on.
            state: New `environment_state`; None keeps the old one.

        Raises:
            RolloutError: If the sample has ended, is in the middle of a turn, or has no room for
                its first token.
        """
        self._check_open()
        if not self.awaits_step and self.num_generated:
            raise RolloutError(f"sample {self.sample_id} is in the middle of a turn")
        answered = dataclasses.replace(
            self,
            awaits_step=False,
            turn_text=None,
            environment_state=self.environment_state if state is None else state,
        )
        if len(token_ids) >= self.remaining_budget:
            if not self.num_generated:
                raise RolloutError(
                    f"sample {self.sample_id} begins with {len(token_ids)} observed tokens, which "
                    f"leave no room in its budget of {self.max_response_tokens}"
                )
            return dataclasses.replace(answered, finish_reason=FinishReason.LENGTH)
        observed = Segment(
            policy_version=self.newest_version or 0,
            token_ids=tuple(token_ids),
            logprobs=(0.0,) * len(token_ids),
            is_generated=False,
        )
        segments = _merge((*self.segments, observed), self.sample_id)
        return dataclasses.replace(answered, segments=segments)

    def finish(
        self, reason: FinishReason = FinishReason.STOP, *, state: Mapping[str, Any] | None = None
    ) -> Sample:
        """Return this sample as ended by its environment, after a turn.

        Raises:
            RolloutError: If it has ended already, or is in the middle of a turn.
        """
        self._check_open()
        if not self.awaits_step:
            raise RolloutError(f"sample {self.sample_id} is in the middle of a turn")
        return dataclasses.replace(
            self,
            finish_reason=reason,
            awaits_step=False,
            turn_text=None,
            environment_state=self.environment_state if state is None else state,
        )

    def restart(self) -> Sample:
        """Return this sample as it was before its first token.

        Raises:
            RolloutError: If it has ended.
        """
        self._check_open()
        return dataclasses.replace(
            self,
            segments=(),
            num_turns=0,
            awaits_step=False,
            environment_state={},
            turn_text=None,
        )

    def _check_open(self) -> None:
        if self.finish_reason is not None:
            raise RolloutError(f"sample {self.sample_id} has already ended")

    def _dated(self, generation: Generation) -> tuple[Segment, ...]:
        """The segments, where observations before the first generated token get its version."""
        first = next((s.policy_version for s in generation.segments if s.token_ids), None)
        if first is None or self.num_generated:
            return self.segments
        return tuple(dataclasses.replace(s, policy_version=first) for s in self.segments)


def _merge(segments: Iterable[Segment], sample_id: str) -> tuple[Segment, ...]:
    """Drop empty segments and join neighbours of one version and kind."""
    merged: list[Segment] = []
    for segment in segments:
        if not segment.token_ids:
            continue
        last = merged[-1] if merged else None
        if last is not None and last.policy_version > segment.policy_version:
            raise RolloutError(
                f"sample {sample_id}: version {segment.policy_version} after {last.policy_version}"
            )
        key = (segment.policy_version, segment.is_generated)
        if last is not None and (last.policy_version, last.is_generated) == key:
            merged[-1] = dataclasses.replace(
                last,
                token_ids=operator.add(last.token_ids, segment.token_ids),  # of one kind
                logprobs=operator.add(last.logprobs, segment.logprobs),
                support=last.support + segment.support,
            )
        else:
            merged.append(segment)
    return tuple(merged)
