"""The one form of a request (core/messages.py)."""

from __future__ import annotations

import pickle

import pytest

from ray_apr.core.exceptions import ConfigError
from ray_apr.core.messages import GenerateRequest, PromptInput, SamplingParams
from ray_apr.core.sample import Prompt, Sample, Segment


def test_a_request_of_a_sample_goes_on_where_it_stopped():
    segment = Segment(policy_version=0, token_ids=(7, 8), logprobs=(-0.5, -0.5))
    sample = Sample(
        sample_id="e0-3-1", group_id="e0-3", max_response_tokens=6, segments=(segment,),
        prompt=Prompt(prompt_id="e0-3", token_ids=(1, 2)),
    )  # fmt: skip
    request = GenerateRequest.of_sample(sample, SamplingParams(min_tokens=3), number=9, seed=5)
    assert (request.request_id, request.sample_id) == ("e0-3-1#9", "e0-3-1")
    assert request.session_id == "e0-3"
    assert request.prompt.token_ids == (1, 2, 7, 8)
    assert (request.max_tokens, request.sampling.min_tokens, request.sampling.seed) == (4, 1, 5)
    assert pickle.loads(pickle.dumps(request)) == request


def test_images_are_refused_by_name_while_nothing_takes_them():
    with pytest.raises(ConfigError, match="token ids alone") as refused:
        PromptInput(token_ids=(1,), images=(b"png",))
    assert refused.value.field == "prompt.images"
