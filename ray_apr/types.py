"""Values that cross processes: frozen, slotted, free of torch and ray.

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
import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from ray_apr.exceptions import RolloutError

_EQUAL_LOGITS = 64
"""Logits equal to the last one within top_k that a support has room for."""


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
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Natural log-probabilities of `token_ids` under the sampling policy, same length."""
    is_generated: bool = True
    """False for what an environment said: context of the policy, never trained."""
    support: tuple[bytes, ...] = ()
    """Of each token the ids that could be drawn in its place, itself included, as 32-bit integers
    (`pack_ids`); none if all of the vocabulary could."""

    def __post_init__(self) -> None:
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


def pack_ids(ids: Iterable[int]) -> bytes:
    """Token ids as 32-bit integers in the machine's order, for `Segment.support`."""
    return array("i", ids).tobytes()


class Origin(StrEnum):
    """Where a request to an engine comes from."""

    ROLLOUT = "rollout"
    """The run's rollout worker: its tokens are in the ledger."""
    EVALUATION = "evaluation"
    """The run's evaluation, whose requests go first in an engine's queue."""
    OUTSIDE = "outside"
    """Somebody else, over HTTP."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn; a plain value, so that no engine class leaves `serve`."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 means all of the vocabulary."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end a response, beside the model's own end-of-sequence id."""
    stop_strings: tuple[str, ...] = ()
    """Texts that end a turn, with the token that completes one."""
    min_tokens: int = 0
    """Tokens before which no id or text ends the response; of one call: those that are left."""
    num_carried: int = 0
    """So many ids at the end of the request are of the same turn: a stop string may begin there."""
    seed: int | None = None
    """Seed of one request; None draws from the engine's own random state."""
    ignore_eos: bool = False
    """Generate the whole budget (replay of traces)."""
    reports_support: bool = False
    """Generations say which ids could be drawn at each token (`Segment.support`); for a `top_k`."""
    origin: Origin = Origin.ROLLOUT
    """Where the request comes from; an engine counts the tokens of each origin apart."""

    @property
    def support_size(self) -> int:
        """Most ids that a generation says could be drawn at a token; 0 if it says none. More than
        `top_k`: of equal logits at its edge vLLM cuts none off."""
        return self.top_k + _EQUAL_LOGITS if self.reports_support else 0

    def of_call(self, sample: Sample, *, seed: int | None = None) -> SamplingParams:
        """Parameters of the next call of a sample, which goes on where the last one ended.

        Example:
            >>> prompt = Prompt(prompt_id="p", token_ids=(1,))
            >>> sample = Sample(
            ...     sample_id="p-0", group_id="p", prompt=prompt, max_response_tokens=8,
            ...     segments=(Segment(policy_version=0, token_ids=(5, 6), logprobs=(0.0, 0.0)),),
            ... )
            >>> SamplingParams(min_tokens=3).of_call(sample).min_tokens
            1
        """
        return dataclasses.replace(
            self,
            seed=seed,
            min_tokens=max(0, self.min_tokens - sample.num_tokens),
            num_carried=len(sample.turn_ids) if self.stop_strings else 0,
        )


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
    num_turns: int = 0
    """Turns that the policy has ended; only counted in a run with an environment."""
    awaits_step: bool = False
    """Whether its last turn has ended and the environment has not answered yet."""
    environment_state: Mapping[str, Any] = field(default_factory=dict)
    """What the environment wants to know at its next step (`Step.state`)."""
    turn_text: str | None = None
    """The last turn, decoded for the environment's step; never encoded again."""
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
                token_ids=last.token_ids + segment.token_ids,
                logprobs=last.logprobs + segment.logprobs,
                support=last.support + segment.support,
            )
        else:
            merged.append(segment)
    return tuple(merged)


MAX_REWARD_METRICS = 64
"""Most figures beside a reward, and most names of them in a step's row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardResult:
    """A reward with figures worth logging beside it."""

    reward: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Finite numbers by name, at most `MAX_REWARD_METRICS`; the run folder has their mean, least
    and greatest of each step."""

    def __post_init__(self) -> None:
        if not math.isfinite(self.reward):
            raise ValueError(f"reward must be a finite number, got {self.reward!r}")
        if len(self.metrics) > MAX_REWARD_METRICS:
            raise ValueError(
                f"a reward has {len(self.metrics)} metrics; at most {MAX_REWARD_METRICS} are kept"
            )
        metrics = {name: _finite(name, value) for name, value in self.metrics.items()}
        object.__setattr__(self, "metrics", metrics)


def _finite(name: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not isinstance(name, str) or not math.isfinite(number):
        raise ValueError(f"metric {name!r} of a reward must be a finite number, got {value!r}")
    return number


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What an environment says after a turn: more to read, or that the sample is done.

    What is read is given as `token_ids`, as `text`, or as chat `messages`, which are rendered as
    the model's template continues a conversation. Only this is encoded; what the policy generated
    stays as it is.
    """

    token_ids: tuple[int, ...] = ()
    text: str = ""
    messages: tuple[Mapping[str, Any], ...] = ()
    done: bool = False
    """The sample ends with its last turn; nothing more can be read then."""
    reward: float | RewardResult | None = None
    """Of a sample that is done; None leaves it to the reward function."""
    state: Mapping[str, Any] | None = None
    """New `Sample.environment_state`, small and picklable; None keeps the old one."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_ids", tuple(self.token_ids))
        object.__setattr__(self, "messages", tuple(self.messages))
        said = [name for name in ("token_ids", "text", "messages") if getattr(self, name)]
        if len(said) > 1:
            raise ValueError(f"a step says one thing, not {' and '.join(said)}")
        if self.done and said:
            raise ValueError(f"a step that is done has no {said[0]}: nobody would read them")
        if self.reward is not None:
            if not self.done:
                raise ValueError("a reward belongs to the step that is done")
            if not isinstance(self.reward, RewardResult):
                object.__setattr__(self, "reward", RewardResult(reward=float(self.reward)))

    @property
    def result(self) -> RewardResult | None:
        """The reward with its figures; None leaves it to the reward function."""
        return self.reward if isinstance(self.reward, RewardResult) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleMeta:
    """What the buffer knows of a scored sample; the payload stays behind an ObjectRef."""

    sample_id: str
    group_id: str
    num_prompt_tokens: int
    num_tokens: int
    """Response tokens, generated and observed."""
    oldest_version: int
    newest_version: int
    reward: float
    finish_reason: FinishReason
    num_interruptions: int
    version_tokens: tuple[tuple[int, int], ...]
    """(policy version, tokens generated under it), oldest first, each version once."""
    reward_metrics: Mapping[str, float] = field(default_factory=dict)
    num_turns: int = 1
    """Turns of the policy; 1 in a run without an environment."""

    @property
    def num_generated(self) -> int:
        """Response tokens that an engine made: those that the ledger counts."""
        return sum(tokens for _, tokens in self.version_tokens)

    def trainable_tokens(self, oldest_version: int) -> int:
        """Generated tokens of `oldest_version` or newer."""
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
            version_tokens=_version_tokens(sample.segments),
            reward_metrics=sample.reward_metrics,
            num_turns=max(1, sample.num_turns),
        )


def _version_tokens(segments: Iterable[Segment]) -> tuple[tuple[int, int], ...]:
    """Generated tokens by version, oldest first."""
    tokens: dict[int, int] = {}
    for segment in segments:
        if segment.is_generated:
            version = segment.policy_version
            tokens[version] = tokens.get(version, 0) + len(segment.token_ids)
    return tuple(tokens.items())


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
        """Response tokens of the group, generated and observed."""
        return sum(s.num_tokens for s in self.samples)

    @property
    def num_generated(self) -> int:
        """Response tokens of the group that an engine made: those that the ledger counts."""
        return sum(s.num_generated for s in self.samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightGroupState:
    """The rollout replicas that run at a moment, as members of a weight group."""

    first_ranks: Mapping[str, int]
    """Rank of each replica's first engine worker in a group of all of them; the sender has 0."""
    num_workers: int
    """Engine workers of all replicas: replicas x tensor-parallel size."""
    is_whole: bool
    """Whether just these have joined the group there is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightScores:
    """What one rollout replica says of given sequences, under weights that it has just received."""

    replica_id: str
    policy_version: int
    dtype: str
    """In which the engine computes."""
    logprobs: tuple[tuple[float, ...], ...]
    """Of each sequence, one for each token but the first; an engine may cut all to one length."""
    duration_s: float
    """How long generation waited for them."""


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
    """Tokens handed out to rollouts since the start (the server's side of the ledger)."""
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
    tokens_made: int = 0
    """Tokens that the engine has made since the start, those of calls under way included."""
    is_stalled: bool = False
    """Whether it has made no token for ``rollout.stall_timeout_s`` although it has requests."""
    tokens_evaluated: int = 0
    """Tokens handed out to evaluations; `tokens_generated` does not count them."""
    tokens_outside: int = 0
    """Tokens handed out to requests from outside of the run, which it does not count either."""
    spans: tuple[tuple[str, float, float], ...] = ()
    """(what, start, end) in Unix seconds since the last call: generate, paused, idle."""

    @property
    def idle_s(self) -> float:
        """Time without a request while not paused, as far as spans have been closed."""
        return max(0.0, self.uptime_s - self.busy_s - self.paused_s)
