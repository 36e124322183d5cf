"""What is said to engines, and what they answer: frozen, slotted, free of torch and ray.

Invariants:
    * A `GenerateRequest` is the one form of a request, from the rollout worker, an evaluation or
      HTTP to the engine; only its least version is raised on the way, by the client.
    * Token ids go in as ids: nothing here encodes text.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from ray_apr.core.exceptions import ConfigError
from ray_apr.core.sample import FinishReason, Sample, Segment

_EQUAL_LOGITS = 64
"""Logits equal to the last one within top_k that a support has room for."""


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
            >>> from ray_apr.core.sample import Prompt, Sample, Segment
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
class PromptInput:
    """What an engine continues: the prompt, and what earlier calls made of its response."""

    token_ids: tuple[int, ...]
    images: tuple[bytes, ...] = ()
    """No engine takes any yet, nor does the trainer."""

    def __post_init__(self) -> None:
        if self.images:
            raise ConfigError(
                "prompt.images",
                f"{len(self.images)} images",
                "must be left out: engines and trainer take token ids alone",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One call of an engine: continue a prompt by at most so many tokens."""

    request_id: str
    """Unique among the calls under way: the sample's id, and after a ``#`` the call's number."""
    prompt: PromptInput
    sampling: SamplingParams
    max_tokens: int
    """Most new tokens of this call."""
    session_id: str = ""
    """Requests of one session share an engine. Those of the run share the KV entries of it that
    outlive a weight sync, too: none meets those of weights that are older than its own session."""
    min_policy_version: int = 0
    """Version of the caller's weights or a newer one, which an engine that has begun anew does not
    have before the next weight sync. One that is paused may get it."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled flat: many travel together, and a dataclass with slots takes thrice as long."""
        given = (self.request_id, self.prompt.token_ids, self.prompt.images, self.sampling)
        return _request, (*given, self.max_tokens, self.session_id, self.min_policy_version)

    @property
    def sample_id(self) -> str:
        """What all calls of one sample have in common."""
        return self.request_id.partition("#")[0]

    @classmethod
    def of_sample(
        cls, sample: Sample, sampling: SamplingParams, *, number: int, seed: int | None = None
    ) -> GenerateRequest:
        """The next call of a sample, which goes on where the last one ended.

        Args:
            sample: What has been generated and observed so far.
            sampling: How responses of the run are drawn.
            number: No other call of the sample has it.
            seed: Of this call.

        Example:
            >>> from ray_apr.core.sample import Prompt, Sample
            >>> sample = Sample(
            ...     sample_id="p-0", group_id="p", max_response_tokens=8,
            ...     prompt=Prompt(prompt_id="p", token_ids=(1, 2)),
            ... )
            >>> request = GenerateRequest.of_sample(sample, SamplingParams(), number=3)
            >>> request.request_id, request.prompt.token_ids, request.max_tokens
            ('p-0#3', (1, 2), 8)
        """
        return cls(
            request_id=f"{sample.sample_id}#{number}",
            prompt=PromptInput(token_ids=(*sample.prompt.token_ids, *sample.response_ids)),
            sampling=sampling.of_call(sample, seed=seed),
            max_tokens=sample.remaining_budget,
            session_id=sample.group_id,
        )


def _request(
    request_id: str,
    token_ids: tuple[int, ...],
    images: tuple[bytes, ...],
    sampling: SamplingParams,
    max_tokens: int,
    session_id: str,
    min_policy_version: int,
) -> GenerateRequest:
    """Undo `GenerateRequest.__reduce__`."""
    return GenerateRequest(
        request_id=request_id,
        prompt=PromptInput(token_ids=token_ids, images=images),
        sampling=sampling,
        max_tokens=max_tokens,
        session_id=session_id,
        min_policy_version=min_policy_version,
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
    request_s: float = 0.0
    """Seconds of all requests together within `busy_s`."""
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
    """Whether it has made no token for ``rollout.engine.stall_timeout_s``, although it has requests
    to make them for."""
    is_leaving: bool = False
    """Whether its node is drained: it gives all requests back, and takes no others."""
    tokens_evaluated: int = 0
    """Tokens handed out to evaluations; `tokens_generated` does not count them."""
    tokens_outside: int = 0
    """Tokens handed out to requests from outside of the run, which it does not count either."""
    spans: tuple[tuple[str, float, float], ...] = ()
    """(what, start, end) in Unix seconds since the last call: generate, paused, idle."""
    steps: tuple[Mapping[str, Any], ...] = ()
    """Rows of the steps of its core since then, where the trainer's step is profiled."""

    @property
    def is_lost(self) -> bool:
        """Whether no request is served by it any more, whatever weights it gets."""
        return self.is_stalled or self.is_leaving

    def takes_requests(self, policy_version: int) -> bool:
        """Whether it takes requests that are to run under a version or a newer one; one that is
        paused will, as it is in a sync or sleeps."""
        is_current = self.weights_valid and self.policy_version >= policy_version
        return not self.is_lost and (self.is_paused or is_current)

    @property
    def idle_s(self) -> float:
        """Time without a request while not paused, as far as spans have been closed."""
        return max(0.0, self.uptime_s - self.busy_s - self.paused_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightGroup:
    """The trainer and all engine workers that run, as those who join are told (`weights.inbox`)."""

    timeout_s: float
    """Limit for all to come, and later for one sync."""
    endpoint: bytes
    """What the workers need to know, pickled: an `Endpoint` of `weights.transports`. A process that
    only hands it on knows nothing of it."""
