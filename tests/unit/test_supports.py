"""Which ids could be drawn at a token, as vLLM tells it (serve/vllm/outputs.py)."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from ray_apr.core.exceptions import RolloutError
from ray_apr.core.messages import SamplingParams
from ray_apr.core.sample import pack_ids
from ray_apr.serve.vllm.outputs import segments_of


def output(sampled: int, likeliest: dict[int, float]) -> SimpleNamespace:
    """vLLM's output of one token: what was drawn stands before the likeliest ids."""
    ids = (sampled, *likeliest)
    logprobs = (likeliest.get(sampled, -math.log(20)), *likeliest.values())
    flat = SimpleNamespace(
        token_ids=ids, logprobs=logprobs, start_indices=[0], end_indices=[len(ids)]
    )
    return SimpleNamespace(token_ids=[sampled], logprobs=flat)


def test_the_support_is_what_has_a_probability():
    told = {7: math.log(0.75), 8: math.log(0.25), 9: -math.inf}
    (segment,) = segments_of(output(8, told), 0, with_support=True)
    assert set(segment.support) <= {pack_ids((7, 8)), pack_ids((8, 7))}
    assert segment.logprobs == (math.log(0.25),)


def test_a_support_that_ties_have_cut_short_is_refused():
    """20 ids tie with the last one within top_k, and vLLM tells of 4: the trainer's distribution
    would be on these alone."""
    told = dict.fromkeys(range(4), -math.log(20))
    with pytest.raises(RolloutError, match=r"rollout\.sampling\.top_k.*bfloat16.*float32"):
        segments_of(output(3, told), 0, with_support=True)
    with pytest.raises(RolloutError, match="than the 5 that"):
        segments_of(output(17, told), 0, with_support=True)
    segments_of(output(3, told), 0, with_support=False)


def test_twenty_ids_that_tie_with_the_last_one_of_a_small_top_k_have_room():
    room = SamplingParams(top_k=2, reports_support=True).support_size
    told = dict.fromkeys(range(min(room, 20)), -math.log(20))
    (segment,) = segments_of(output(3, told), 0, with_support=True)
    assert len(segment.support[0]) == 4 * 20
