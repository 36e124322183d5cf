"""Payload of live samples (rollout/store.py)."""

from __future__ import annotations

import dataclasses

import pytest

from ray_apr.exceptions import RolloutError
from ray_apr.rollout.store import SampleStore
from ray_apr.types import FinishReason, Generation, Prompt, Sample, Segment

PROMPT = Prompt(prompt_id="p", token_ids=(1, 2))


def sample(name, group="g"):
    return Sample(sample_id=name, group_id=group, prompt=PROMPT, max_response_tokens=4)


def generation(version, *ids, reason=FinishReason.ABORT):
    part = Segment(policy_version=version, token_ids=ids, logprobs=(0.0,) * len(ids))
    return Generation(request_id="r", segments=(part,), finish_reason=reason)


@pytest.fixture
def store():
    store = SampleStore()
    for name, group in (("a", "g"), ("b", "g"), ("c", "h")):
        store.add(sample(name, group))
    return store


def test_samples_and_groups_in_order_of_admission(store):
    assert [s.sample_id for s in store] == ["a", "b", "c"]
    assert [s.sample_id for s in store.group("g")] == ["a", "b"]
    assert len(store) == 3 and "a" in store and "z" not in store
    assert store.group("unknown") == []


def test_held_tokens_follow_interruptions_resumes_and_ends(store):
    store.append("a", generation(0, 11, 12))
    store.append("b", generation(0))
    assert store.held_tokens == 2
    assert store.append("a", generation(1, 13)).response_ids == (11, 12, 13)
    assert store.held_tokens == 3
    store.append("a", generation(1, 14, reason=FinishReason.STOP))
    assert store.held_tokens == 0
    store.append("c", generation(1, 1))
    store.pop(["c"])
    assert store.held_tokens == 0


def test_restored_sample_brings_its_tokens():
    store = SampleStore()
    store.add(sample("a").append(generation(3, 1, 2)))
    assert store.held_tokens == 2


def test_spent_budget_ends_a_sample_and_overspending_is_refused(store):
    with pytest.raises(RolloutError, match="budget"):
        store.append("a", generation(0, 1, 2, 3, 4, 5))
    assert store.get("a").num_tokens == 0
    assert store.append("a", generation(0, 1, 2, 3, 4)).finish_reason is FinishReason.LENGTH
    with pytest.raises(RolloutError, match="already ended"):
        store.append("a", generation(0, 1))


def test_replace_takes_text_and_reward_only(store):
    ended = store.append("a", generation(0, 1, reason=FinishReason.STOP))
    store.replace(dataclasses.replace(ended, response_text="x", reward=1.0))
    assert store.get("a").reward == 1.0
    other_ids = Segment(policy_version=0, token_ids=(2,), logprobs=(0.0,))
    for change in (
        {"segments": (other_ids,)},
        {"finish_reason": None},
        {"max_response_tokens": 9},
        {"group_id": "h"},
        {"prompt": Prompt(prompt_id="p", token_ids=(1, 2, 3))},
    ):
        with pytest.raises(RolloutError, match="only append"):
            store.replace(dataclasses.replace(ended, **change))


def test_pop_takes_all_or_nothing(store):
    with pytest.raises(RolloutError, match="handed over or dropped"):
        store.pop(["a", "unknown"])
    assert len(store) == 3
    assert [s.sample_id for s in store.pop(["b", "a"])] == ["b", "a"]
    assert store.group("g") == [] and [s.sample_id for s in store.pop_group("h")] == ["c"]
    assert store.pop_group("h") == [] and len(store) == 0


def test_ids_are_new_when_added_and_known_when_used(store):
    with pytest.raises(RolloutError, match="already"):
        store.add(sample("a"))
    for use in (
        lambda: store.get("z"),
        lambda: store.append("z", generation(0, 1)),
        lambda: store.replace(sample("z")),
    ):
        with pytest.raises(RolloutError, match="not in the store"):
            use()


def test_store_may_change_while_it_is_iterated(store):
    for member in store:
        store.pop([member.sample_id])
    assert len(store) == 0
