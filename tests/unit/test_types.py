"""Values that cross processes (types.py) and the errors (exceptions.py)."""

from __future__ import annotations

import dataclasses
import inspect
import math
import pickle
from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_apr.core import exceptions
from ray_apr.core.exceptions import APRError, RolloutError
from ray_apr.core.group import GroupMeta, SampleMeta
from ray_apr.core.messages import Generation, SamplingParams, ServerStatus
from ray_apr.core.sample import FinishReason, Prompt, Sample, Segment, pack_ids
from ray_apr.core.user import RewardResult, Step

HUGE = pytest.param(10**400, id="huge")
"""Beyond what a float holds."""
PROMPT = Prompt(prompt_id="e0-0", token_ids=(1, 2, 3), row={"answer": 4})


def sample(budget=8):
    return Sample(sample_id="s", group_id="g", prompt=PROMPT, max_response_tokens=budget)


def segment(version, *ids):
    return Segment(policy_version=version, token_ids=ids, logprobs=tuple(-float(i) for i in ids))


def generation(*segments, reason=FinishReason.ABORT):
    return Generation(request_id="r", segments=segments, finish_reason=reason)


def test_segment_needs_a_logprob_for_each_token():
    with pytest.raises(RolloutError, match="2 token ids and 1 log-probs"):
        Segment(policy_version=0, token_ids=(1, 2), logprobs=(0.0,))


def test_the_support_of_tokens_goes_along_with_them():
    def supported(version, *ids):
        support = tuple(pack_ids({i, 99}) for i in ids)
        return dataclasses.replace(segment(version, *ids), support=support)

    with pytest.raises(RolloutError, match="2 token ids and 1 supports"):
        dataclasses.replace(segment(0, 1, 2), support=(pack_ids([1]),))
    s = sample().append(generation(supported(3, 11, 12)))
    s = s.append(
        generation(supported(3, 13), supported(5, 14), reason=FinishReason.STOP), ends_turn=True
    )
    s = s.observe((20, 21)).append(generation(supported(5, 15), reason=FinishReason.STOP))
    sets = [set(array("i", ids)) for ids in s.support]
    assert sets == [{11, 99}, {12, 99}, {13, 99}, {14, 99}, set(), set(), {15, 99}]
    assert s.segments[0].up_to(2) == supported(3, 11, 12)
    assert sample().append(generation(segment(3, 11))).support == ()
    assert SamplingParams(top_k=5).support_size == 0
    assert SamplingParams(top_k=5, reports_support=True).support_size >= 5


def test_append_keeps_ids_logprobs_and_versions_in_step():
    s = sample().append(generation(segment(3, 11, 12)))
    s = s.append(generation(segment(3, 13), segment(5, 14), reason=FinishReason.STOP))
    assert s.response_ids == (11, 12, 13, 14)
    assert s.behavior_logprobs == (-11.0, -12.0, -13.0, -14.0)
    assert s.token_versions == (3, 3, 3, 5)
    assert [g.policy_version for g in s.segments] == [3, 5]
    assert (s.oldest_version, s.newest_version) == (3, 5)
    assert s.prompt.token_ids == (1, 2, 3)
    assert s.finish_reason is FinishReason.STOP and s.num_interruptions == 1


def test_abort_without_tokens_leaves_the_sample_as_it_was():
    s = sample().append(generation())
    assert s == sample() and s.oldest_version is None
    s = s.append(generation(segment(0)))
    assert s.segments == () and s.num_interruptions == 0


def test_resumed_sample_gets_what_remains_of_the_budget():
    s = sample(budget=4).append(generation(segment(0, 1, 2, 3)))
    assert s.remaining_budget == 1
    with pytest.raises(RolloutError, match="2 tokens with 1 left in its budget of 4"):
        s.append(generation(segment(1, 4, 5)))


def test_abort_with_the_last_token_of_the_budget_is_an_end():
    s = sample(budget=2).append(generation(segment(0, 1, 2)))
    assert s.finish_reason is FinishReason.LENGTH and s.num_interruptions == 0


def test_an_ended_sample_takes_no_more_tokens():
    s = sample().append(generation(segment(0, 1), reason=FinishReason.STOP))
    with pytest.raises(RolloutError, match="already ended"):
        s.append(generation(segment(0, 2)))


def test_versions_never_decrease():
    s = sample().append(generation(segment(4, 1)))
    with pytest.raises(RolloutError, match="version 3 after 4"):
        s.append(generation(segment(3, 2)))


calls = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 4)), max_size=8)


@given(calls, st.integers(1, 12))
def test_append_over_any_calls(parts, budget):
    s, version, total = sample(budget), 0, 0
    for step, size in parts:
        version += step
        ids = tuple(range(total, total + size))
        if s.finish_reason is not None or total + size > budget:
            with pytest.raises(RolloutError):
                s.append(generation(segment(version, *ids)))
            break
        s = s.append(generation(segment(version, *ids)))
        total += size
        assert s.num_tokens == total <= budget
        assert s.response_ids == tuple(range(total))
        assert len(s.behavior_logprobs) == len(s.token_versions) == total
        assert list(s.token_versions) == sorted(s.token_versions)
        assert (s.finish_reason is FinishReason.LENGTH) == (total == budget)


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf, "1", None, HUGE])
def test_reward_is_finite(reward):
    with pytest.raises(ValueError, match="reward must be a finite number"):
        RewardResult(reward=reward)


@pytest.mark.parametrize("reward", [1, True, np.True_, np.float32(1), np.int64(1), np.array(1.0)])
def test_reward_of_another_kind_of_number_is_a_plain_one(reward):
    """JSON and Arrow, which rows and checkpoints are written as, take no number of NumPy's."""
    result = RewardResult(reward=reward)
    assert (result.reward, type(result.reward)) == (1.0, float)
    assert Step(done=True, reward=result).result == result


@pytest.mark.parametrize("value", [math.nan, math.inf, None, "high"])
def test_what_a_reward_tells_beside_its_number_is_finite(value):
    with pytest.raises(ValueError, match=r"metric 'form' of a reward must be a finite number"):
        RewardResult(reward=1.0, metrics={"form": value})


def test_what_a_reward_tells_beside_its_number_is_bounded_and_plain():
    assert RewardResult(reward=1.0, metrics={"ok": True}).metrics == {"ok": 1.0}
    with pytest.raises(ValueError, match="65 metrics; at most 64"):
        RewardResult(reward=1.0, metrics={str(i): 0.0 for i in range(65)})


def test_meta_of_a_scored_sample():
    s = sample().append(generation(segment(1, 1), segment(2, 2, 3), reason=FinishReason.STOP))
    meta = SampleMeta.of(dataclasses.replace(s, reward=0.5))
    assert (meta.oldest_version, meta.newest_version) == (1, 2)
    assert (meta.num_prompt_tokens, meta.num_tokens, meta.reward) == (3, 3, 0.5)


def test_meta_is_refused_without_end_reward_or_token():
    ended = sample().append(generation(segment(0, 1), reason=FinishReason.STOP))
    empty = sample().append(generation(reason=FinishReason.STOP))
    for s in (
        dataclasses.replace(sample(), reward=1.0),
        ended,
        dataclasses.replace(empty, reward=1.0),
    ):
        with pytest.raises(RolloutError, match="not finished and scored"):
            SampleMeta.of(s)


def test_group_is_as_old_as_its_oldest_token():
    def meta(name, version):
        s = sample().append(generation(segment(version, 1), reason=FinishReason.STOP))
        return SampleMeta.of(dataclasses.replace(s, sample_id=name, reward=0.0))

    group = GroupMeta(group_id="g", sequence=0, samples=(meta("a", 4), meta("b", 2)))
    assert group.oldest_version == 2 and group.num_tokens == 2


VALUES = [
    sample().append(generation(segment(0, 1))),
    generation(segment(0, 1)),
    SamplingParams(stop_token_ids=(7,)),
    RewardResult(reward=1.0, metrics={"a": 1.0}),
    ServerStatus(
        replica_id="r",
        policy_version=0,
        is_paused=False,
        weights_valid=True,
        num_running=0,
        tokens_generated=0,
        num_aborted=0,
        uptime_s=0.0,
        busy_s=0.0,
        paused_s=0.0,
    ),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda v: type(v).__name__)
def test_values_survive_pickling_and_are_frozen(value):
    assert pickle.loads(pickle.dumps(value)) == value
    name = dataclasses.fields(value)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, name, None)


ERRORS = [e for _, e in inspect.getmembers(exceptions, inspect.isclass) if issubclass(e, APRError)]


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: e.__name__)
def test_errors_survive_pickling_and_are_standard_errors(error):
    ours = [c for c in error.__mro__ if c.__module__ == exceptions.__name__]
    own = any("__init__" in vars(c) for c in ours)
    names = list(inspect.signature(error).parameters) if own else ["message"]
    original = error(*(f"{n}-value" for n in names))
    copy = pickle.loads(pickle.dumps(original))
    assert type(copy) is error
    assert str(copy) == str(original) and str(copy)
    assert copy.args == original.args and vars(copy) == vars(original)
    builtin = [b for b in error.__mro__ if b.__module__ == "builtins"]
    assert error is APRError or builtin[0] is not Exception
