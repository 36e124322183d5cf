"""Finished samples for tests of rewards."""

from __future__ import annotations

from typing import Any

import ray.cloudpickle

from ray_apr.core.messages import Generation
from ray_apr.core.sample import FinishReason, Prompt, Sample, Segment


def sample_of(response: str | None, *, num_tokens: int = 1, **row: Any) -> Sample:
    """A sample with this response, of `num_tokens` of at most 100 tokens, and this row."""
    segment = Segment(policy_version=0, token_ids=(7,) * num_tokens, logprobs=(-0.5,) * num_tokens)
    generation = Generation(request_id="r", segments=(segment,), finish_reason=FinishReason.STOP)
    return Sample(
        sample_id="g0-0",
        group_id="g0",
        prompt=Prompt(prompt_id="g0", token_ids=(1,), row=row),
        max_response_tokens=100,
        response_text=response,
    ).append(generation)


def round_trip(function: Any) -> Any:
    """A function as a Ray worker gets it."""
    return ray.cloudpickle.loads(ray.cloudpickle.dumps(function))
