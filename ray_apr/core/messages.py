"""What is said to an engine: frozen, slotted, free of torch and ray.

Invariants:
    * A `GenerateRequest` is the one form of a request, from the rollout worker, an evaluation or
      HTTP to the engine; only its least version is filled in on the way, by the client.
    * Token ids go in as ids: nothing here encodes text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ray_apr.exceptions import ConfigError

if TYPE_CHECKING:
    from ray_apr.types import Sample, SamplingParams


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
    """Requests of one session share an engine, and the KV entries of it that outlive a weight
    sync: none meets those of weights that are older than its own session."""
    min_policy_version: int = 0
    """Version of the caller's weights, which an engine that has begun anew does not have before the
    next weight sync. One that is paused may get it."""

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
            >>> from ray_apr.types import Prompt, Sample, SamplingParams
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
class WeightGroup:
    """The trainer and all engine workers that run, as those who join are told (`weights.inbox`)."""

    timeout_s: float
    """Limit for all to come, and later for one sync."""
    endpoint: bytes
    """What the workers need to know, pickled: an `Endpoint` of `weights.transports`. A process that
    only hands it on knows nothing of it."""
