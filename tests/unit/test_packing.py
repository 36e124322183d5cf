"""Ranks and micro-batches (scheduling/packing.py)."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ray_apr.scheduling.packing import plan_micro_batches


def plan(lengths, ranks, limit, packed=False):
    return plan_micro_batches(lengths, num_ranks=ranks, micro_batch_tokens=limit, packed=packed)


def loads(result, lengths):
    return [sum(lengths[i] for mb in rank for i in mb) for rank in result]


cases = st.integers(1, 8).flatmap(
    lambda ranks: st.tuples(
        st.lists(st.integers(1, 300), min_size=ranks, max_size=60),
        st.just(ranks),
        st.integers(1, 600),
    )
)


@given(cases, st.booleans())
@example(([300] * 3, 2, 100), False)
@example(([1000] * 8 + [10] * 8, 2, 16384), False)
def test_plan_over_any_lengths(case, packed):
    lengths, ranks, limit = case
    result = plan(lengths, ranks, limit, packed)
    assert plan(lengths, ranks, limit, packed) == result
    assert len(result) == ranks
    indices = [i for rank in result for mb in rank for i in mb]
    assert sorted(indices) == list(range(len(lengths)))
    assert len({len(rank) for rank in result}) == 1 and len(result[0]) >= 1
    assert all(any(rank) for rank in result)
    for mb in (mb for rank in result for mb in rank if len(mb) > 1):
        padded = len(mb) * max(lengths[i] for i in mb)
        assert (sum(lengths[i] for i in mb) if packed else padded) <= limit
    tokens = loads(result, lengths)
    assert max(tokens) - min(tokens) <= max(lengths)
    sizes = [sum(map(len, rank)) for rank in result]
    assert max(sizes) - min(sizes) <= 1
    if len(lengths) % ranks == 0:
        assert all(mb for rank in result for mb in rank)


@given(cases)
def test_similar_lengths_are_together(case):
    lengths, ranks, limit = case
    for rank in plan(lengths, ranks, limit):
        in_order = [lengths[i] for mb in rank for i in mb]
        assert in_order == sorted(in_order, reverse=True)


@given(cases)
def test_no_fewer_micro_batches_would_do(case):
    """The rank that sets their number cannot do with one less: greedy cuts are optimal."""
    lengths, ranks, limit = case
    result = plan(lengths, ranks, limit)
    if len(result[0]) == 1:
        return

    def fewest(sorted_lengths):
        count, room = 0, 0
        for length in sorted_lengths:
            if room == 0:
                count, room = count + 1, max(1, limit // length)
            room -= 1
        return count

    needed = [fewest([lengths[i] for mb in rank for i in mb]) for rank in result]
    assert max(needed) == len(result[0])


def test_everything_fits_one_micro_batch():
    assert plan([3, 5, 4], 1, 15) == (((1, 2, 0),),)


def test_sample_longer_than_the_limit_is_alone():
    assert plan([100, 2, 2], 1, 10) == (((0,), (1, 2)),)


def test_padding_counts():
    # 10 + 1 tokens would fit 12, but padded they are 2 * 10.
    assert plan([10, 1], 1, 12) == (((0,), (1,)),)


def test_packed_tokens_alone_count():
    assert plan([10, 1], 1, 12, packed=True) == (((0, 1),),)
    assert plan([8, 7, 3, 2], 1, 10, packed=True) == (((0, 3), (1, 2)),)


def test_a_rank_with_fewer_micro_batches_splits_its_costliest():
    lengths = [90, 50, 50, 50, 10, 10]
    result = plan(lengths, 2, 100)
    assert {len(rank) for rank in result} == {max(len(rank) for rank in result)}
    assert all(mb for rank in result for mb in rank)


def test_equal_lengths_are_spread_evenly():
    result = plan([7] * 16, 4, 14)
    assert loads(result, [7] * 16) == [28] * 4
    assert all(len(mb) == 2 for rank in result for mb in rank)


def test_the_longest_of_a_round_goes_to_the_emptiest_rank():
    assert loads(plan([8, 7, 6, 5], 2, 8), [8, 7, 6, 5]) == [13, 13]


def test_long_tail_is_spread_over_the_ranks():
    lengths = [1000] * 4 + [10] * 60
    assert loads(plan(lengths, 4, 2000), lengths) == [1150] * 4


@pytest.mark.parametrize(
    ("lengths", "ranks", "limit"),
    [([], 1, 8), ([1], 2, 8), ([1], 0, 8), ([1], 1, 0), ([0, 1], 1, 8)],
)
def test_senseless_input_is_refused(lengths, ranks, limit):
    with pytest.raises(ValueError, match=r"at least 1|cannot give"):
        plan(lengths, ranks, limit)
