"""Values that cross processes: frozen, slotted, free of torch and ray.

Invariants:
    * A segment's ids and log-probs have the same length; segments are in order of generation, and
      their policy versions never decrease.
    * Tokens enter a sample through `Sample.append` alone, which keeps ids, log-probs, versions and
      the budget in step. Prompt and response never mix.
    * Token ids go in and come out as ids: nothing here decodes or encodes text.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from ray_apr.exceptions import RolloutError


class SampleState(StrEnum):
    """Where a sample is: WAITING -> INFLIGHT <-> INTERRUPTED -> FINISHED -> ... -> TRAINED."""

    WAITING = "waiting"
    INFLIGHT = "inflight"
    INTERRUPTED = "interrupted"
    FINISHED = "finished"
    SCORED = "scored"
    BUFFERED = "buffered"
    TRAINED = "trained"
    EVICTED = "evicted"
    FILTERED = "filtered"
    FAILED = "failed"


class FinishReason(StrEnum):
    """Why one generate call ended. ABORT means that the sample can be resumed."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Tokens made under one policy version, as the engine attests it."""

    policy_version: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Natural log-probabilities of `token_ids` under the sampling policy, same length."""

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.logprobs):
            raise RolloutError(
                f"segment has {len(self.token_ids)} token ids and {len(self.logprobs)} log-probs"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn; a plain value, so that no engine class leaves `serve`."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 means all of the vocabulary."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end a response, beside the model's own end-of-sequence id."""
    seed: int | None = None
    """Seed of one request; None draws from the engine's own random state."""
    ignore_eos: bool = False
    """Generate the whole budget (replay of traces)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What one generate call returned: the new tokens only, never the prompt."""

    request_id: str
    segments: tuple[Segment, ...]
    finish_reason: FinishReason
    replica_id: str = ""

    @property
    def num_tokens(self) -> int:
        """New tokens of this call."""
        return sum(len(s.token_ids) for s in self.segments)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A task to sample from."""

    prompt_id: str
    """Unique in a run, e.g. ``"e0-17"``: epoch and position in the epoch's order."""
    token_ids: tuple[int, ...]
    row: Mapping[str, Any] = field(default_factory=dict)
    """The dataset's row, for the reward function."""
    num_retries: int = 0
    """Times that a group of this prompt was dropped and tried again."""


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
    response_text: str | None = None
    """Decoded once, after the end, for the reward function; never encoded again."""
    reward: float | None = None
    reward_metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def row(self) -> Mapping[str, Any]:
        """The prompt's row of the dataset, for the reward function."""
        return self.prompt.row

    @property
    def num_tokens(self) -> int:
        """Response tokens so far."""
        return sum(len(s.token_ids) for s in self.segments)

    @property
    def remaining_budget(self) -> int:
        """Response tokens that may still be generated."""
        return self.max_response_tokens - self.num_tokens

    @property
    def response_ids(self) -> tuple[int, ...]:
        """Token ids of the response, in order."""
        return tuple(itertools.chain.from_iterable(s.token_ids for s in self.segments))

    @property
    def behavior_logprobs(self) -> tuple[float, ...]:
        """Log-probs of the response tokens under the policies that sampled them."""
        return tuple(itertools.chain.from_iterable(s.logprobs for s in self.segments))

    @property
    def token_versions(self) -> tuple[int, ...]:
        """Policy version of each response token."""
        return tuple(
            itertools.chain.from_iterable(
                [s.policy_version] * len(s.token_ids) for s in self.segments
            )
        )

    @property
    def oldest_version(self) -> int | None:
        """Policy version of the first response token; None while there is none."""
        return self.segments[0].policy_version if self.segments else None

    @property
    def newest_version(self) -> int | None:
        """Policy version of the last response token; None while there is none."""
        return self.segments[-1].policy_version if self.segments else None

    def append(self, generation: Generation) -> Sample:
        """Return this sample with the tokens of one more generate call.

        Neighbouring segments of one version are merged. An aborted call leaves the sample
        unfinished, unless its budget is spent.

        Raises:
            RolloutError: If the sample has ended, the budget is exceeded, or versions decrease.
        """
        if self.finish_reason is not None:
            raise RolloutError(f"sample {self.sample_id} has already ended")
        if generation.num_tokens > self.remaining_budget:
            raise RolloutError(
                f"sample {self.sample_id} got {generation.num_tokens} tokens with "
                f"{self.remaining_budget} left in its budget of {self.max_response_tokens}"
            )
        segments = _merge((*self.segments, *generation.segments), self.sample_id)
        aborted = generation.finish_reason is FinishReason.ABORT
        reason: FinishReason | None = None if aborted else generation.finish_reason
        if aborted and generation.num_tokens == self.remaining_budget:
            aborted, reason = False, FinishReason.LENGTH
        return dataclasses.replace(
            self,
            segments=segments,
            finish_reason=reason,
            num_interruptions=self.num_interruptions + (aborted and generation.num_tokens > 0),
        )


def _merge(segments: Iterable[Segment], sample_id: str) -> tuple[Segment, ...]:
    """Drop empty segments and join neighbours of one version."""
    merged: list[Segment] = []
    for segment in segments:
        if not segment.token_ids:
            continue
        last = merged[-1] if merged else None
        if last is not None and last.policy_version > segment.policy_version:
            raise RolloutError(
                f"sample {sample_id}: version {segment.policy_version} after {last.policy_version}"
            )
        if last is not None and last.policy_version == segment.policy_version:
            merged[-1] = Segment(
                policy_version=last.policy_version,
                token_ids=last.token_ids + segment.token_ids,
                logprobs=last.logprobs + segment.logprobs,
            )
        else:
            merged.append(segment)
    return tuple(merged)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardResult:
    """A reward with figures worth logging beside it."""

    reward: float
    metrics: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not math.isfinite(self.reward):
            raise ValueError(f"reward must be a finite number, got {self.reward!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleMeta:
    """What the buffer knows of a scored sample; the payload stays behind an ObjectRef."""

    sample_id: str
    group_id: str
    num_prompt_tokens: int
    num_tokens: int
    """Response tokens."""
    oldest_version: int
    newest_version: int
    reward: float
    finish_reason: FinishReason
    num_interruptions: int
    version_tokens: tuple[tuple[int, int], ...]
    """(policy version, response tokens made under it), oldest first."""

    def trainable_tokens(self, oldest_version: int) -> int:
        """Response tokens of `oldest_version` or newer."""
        return sum(tokens for version, tokens in self.version_tokens if version >= oldest_version)

    def trained_version(self, oldest_version: int) -> int | None:
        """Version of its first token of `oldest_version` or newer; None if there is none."""
        return next((v for v, _ in self.version_tokens if v >= oldest_version), None)

    @classmethod
    def of(cls, sample: Sample) -> SampleMeta:
        """Describe a finished, scored sample.

        Raises:
            RolloutError: If it has not ended, has no reward, or has no token.
        """
        oldest, newest = sample.oldest_version, sample.newest_version
        if (
            sample.finish_reason is None
            or sample.reward is None
            or oldest is None
            or newest is None
        ):
            raise RolloutError(f"sample {sample.sample_id} is not finished and scored")
        return cls(
            sample_id=sample.sample_id,
            group_id=sample.group_id,
            num_prompt_tokens=len(sample.prompt.token_ids),
            num_tokens=sample.num_tokens,
            oldest_version=oldest,
            newest_version=newest,
            reward=sample.reward,
            finish_reason=sample.finish_reason,
            num_interruptions=sample.num_interruptions,
            version_tokens=tuple((s.policy_version, len(s.token_ids)) for s in sample.segments),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMeta:
    """A whole group in the buffer: it trains whole or not at all (invariant 4)."""

    group_id: str
    sequence: int
    """Order of arrival in the buffer."""
    samples: tuple[SampleMeta, ...]

    @property
    def oldest_version(self) -> int:
        """Version of the oldest token of the group."""
        return min(s.oldest_version for s in self.samples)

    @property
    def newest_version(self) -> int:
        """Version of the newest token of the group."""
        return max(s.newest_version for s in self.samples)

    @property
    def num_tokens(self) -> int:
        """Response tokens of the group."""
        return sum(s.num_tokens for s in self.samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerStatus:
    """One rollout replica, as it sees itself. Times are seconds since the replica started."""

    replica_id: str
    policy_version: int
    is_paused: bool
    weights_valid: bool
    """False after a broken weight sync, until the next one that succeeds."""
    num_running: int
    """Requests that the engine holds, queued ones included."""
    tokens_generated: int
    """Tokens handed out since the start (the server's side of the ledger)."""
    num_aborted: int
    uptime_s: float
    busy_s: float
    """Time with at least one request running and the engine not paused."""
    paused_s: float
    num_queued: int = 0
    """Of the requests, those that wait inside of the engine for a place or for KV entries."""
    kv_usage: float = 0.0
    """Share of the KV cache in use."""
    num_preempted: int = 0
    """Requests that lost their KV entries to others, since the start."""
    num_ended: int = 0
    """Calls that came to their own end, since the start."""
    spans: tuple[tuple[str, float, float], ...] = ()
    """(what, start, end) in Unix seconds since the last call: generate, paused, idle."""
