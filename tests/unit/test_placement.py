"""Which replica gets a request, and how many each one may have (placement.py)."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_apr.scheduling.routing import AdaptiveLimit, Placement

moves = st.lists(
    st.tuples(st.sampled_from(["enter", "leave", "limit"]), st.integers(0, 20), st.integers(0, 9)),
    max_size=200,
)


@given(moves, st.integers(1, 4), st.integers(1, 5))
def test_no_limit_is_exceeded_while_another_replica_has_room(history, num_replicas, limit):
    placement = Placement([str(i) for i in range(num_replicas)], limit=limit)
    limits = {str(i): limit for i in range(num_replicas)}
    running: list[str] = []
    for what, number, other in history:
        if what == "enter":
            has_room = any(running.count(r) < limits[r] for r in limits)
            replica = placement.enter(f"g{number}-{other}", f"g{number}")
            assert running.count(replica) < limits[replica] or not has_room
            running.append(replica)
        elif what == "leave" and running:
            placement.leave(running.pop(number % len(running)))
        elif what == "limit":
            replica = str(number % num_replicas)
            placement.set_limit(replica, other)
            limits[replica] = max(1, other)
        assert placement.capacity == sum(limits.values())
        for replica, expected in limits.items():
            assert placement.limit(replica) == expected
            assert placement.load(replica) == running.count(replica)


def test_replicas_that_stay_keep_their_loads_and_those_that_come_are_filled_first():
    """Loads began anew at 0, so that those that stayed got as much as those that had nothing."""
    placement = Placement("ab", limit=10)
    for number in range(8):
        placement.enter(f"g{number}-0", f"g{number}")
    placement.set_limit("b", 20)
    placement.change("bcd", limit=10)
    assert [placement.load(r) for r in "bcd"] == [4, 0, 0]
    assert (placement.limit("b"), placement.capacity) == (20, 40)
    assert {placement.enter(f"n{i}-0", f"n{i}") for i in range(4)} == {"c", "d"}
    assert placement.enter("g0-0", "g0") != "a", "its home is gone"
    for _ in range(4):
        placement.leave("a")
    placement.change("abcd", limit=10)
    assert placement.load("a") == 0


def test_loads_stay_even():
    placement = Placement("abc", limit=10)
    for number in range(21):
        placement.enter(f"g{number}-0", f"g{number}")
    assert [placement.load(r) for r in "abc"] == [7, 7, 7]


def test_fill_counts_not_load():
    placement = Placement("ab", limit=2)
    placement.set_limit("b", 20)
    for number in range(11):
        placement.enter(f"g{number}-0", f"g{number}")
    assert (placement.load("a"), placement.load("b")) == (1, 10)


def test_a_sample_returns_to_its_replica_and_a_group_meets():
    placement = Placement("abcd", limit=16)
    first = placement.enter("g0-0", "g0")
    assert placement.enter("g0-1", "g0") == first
    placement.leave(first)
    assert placement.enter("g1-0", "g1") != first, "the emptiest one gets what is new"
    assert placement.enter("g0-0", "g0") == first


def test_stickiness_ends_where_the_home_is_markedly_fuller():
    placement = Placement("ab", limit=8)
    home = placement.enter("g0-0", "g0")
    assert placement.enter("g0-1", "g0") == home  # 1/8 fuller is no more than the slack
    assert placement.enter("g0-2", "g0") != home


def test_a_full_home_is_left():
    placement = Placement("ab", limit=1)
    home = placement.enter("s", "g")
    other = placement.enter("s2", "g")
    assert other != home
    placement.enter("s3", "g")
    placement.enter("s4", "g")
    assert placement.load(home) == placement.load(other) == 2, "when all are full, evenly"


def test_choosing_does_not_get_slower_nor_larger_with_use():
    placement = Placement([str(i) for i in range(64)], limit=1000)
    for number in range(20_000):
        placement.enter(f"g{number}-0", f"g{number}")
        placement.leave(placement.enter(f"g{number}-1", f"g{number}"))
    assert len(placement._heap) < 1000, "what no longer holds is dropped"


def test_homes_are_remembered_as_far_as_many_requests_reach_and_no_further():
    placement = Placement("ab", limit=1000)
    first = placement.enter("s-0", "s")
    for number in range(20_000):
        if number < 7_000:
            assert placement.enter("s-0", "s") == first, "used a moment ago"
            placement.leave(first)
        placement.leave(placement.enter(f"g{number}-0", f"g{number}"))
    assert len(placement._homes) == 16_000
    placement.change("ab", limit=1000)
    placement.set_limit("a", 1)
    placement.set_limit("b", 1)
    placement.enter("t-0", "t")
    assert len(placement._homes) == 1024, "fewer requests need fewer"


@pytest.mark.parametrize("num_replicas", [16, 4096])
def test_choosing_costs_log_n(num_replicas):
    placement = Placement([str(i) for i in range(num_replicas)], limit=100)
    begin = time.perf_counter()
    for number in range(10_000):
        placement.leave(placement.enter(f"g{number}-0", f"g{number}"))
    assert (time.perf_counter() - begin) / 10_000 < 500e-6  # about 5 us; loose for a busy machine


def observe(limit, **figures):
    values = dict(num_running=limit.limit, num_queued=0, kv_usage=0.2, num_preempted=0, num_ended=0)
    return limit.observe(**{**values, "is_starved": False, **figures})


def test_the_limit_grows_with_what_ends_while_there_is_room():
    limit = AdaptiveLimit(10)
    assert observe(limit, num_ended=7) == 10
    assert observe(limit, num_ended=1) == 11
    assert observe(limit, num_ended=16) == 13


def test_the_limit_does_not_grow_when_it_is_not_used():
    assert observe(AdaptiveLimit(10), num_running=5, num_ended=80) == 10


def test_a_full_cache_ends_growth_and_a_starved_trainer_allows_more():
    assert observe(AdaptiveLimit(10), kv_usage=0.8, num_ended=80) == 10
    assert observe(AdaptiveLimit(10), kv_usage=0.8, num_ended=80, is_starved=True) == 20
    assert observe(AdaptiveLimit(10), kv_usage=0.95, num_running=8, is_starved=True) == 8


def test_a_queue_shrinks_it_if_it_stays():
    limit = AdaptiveLimit(10)
    assert observe(limit, num_running=7, num_queued=3) == 10
    assert observe(limit, num_running=7, num_queued=3) == 7


def test_a_preemption_shrinks_it_at_once_and_only_once():
    limit = AdaptiveLimit(20)
    assert observe(limit, num_running=18, num_queued=2, num_preempted=2) == 16
    assert observe(limit, num_running=18, num_queued=0, num_preempted=3) == 16


@given(st.lists(st.tuples(*[st.integers(0, 30)] * 4, st.floats(0, 1), st.booleans()), max_size=50))
def test_the_limit_is_at_least_one(history):
    limit = AdaptiveLimit(4)
    for running, queued, preempted, ended, kv_usage, is_starved in history:
        now = limit.observe(
            num_running=running,
            num_queued=queued,
            kv_usage=kv_usage,
            num_preempted=preempted,
            num_ended=ended,
            is_starved=is_starved,
        )
        assert now == limit.limit >= 1
