"""Numbers of a response that are kept as bytes."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_apr.core.exceptions import RolloutError
from ray_apr.core.packed import LogProbs, TokenIds
from ray_apr.core.sample import Segment

ids = st.lists(st.integers(0, 2**31 - 1))
logprobs = st.lists(st.floats(max_value=0.0, allow_nan=False))
slices = st.slices(12)


@given(ids, slices)
def test_token_ids_are_as_a_tuple_of_them(numbers: list[int], part: slice) -> None:
    packed, plain = TokenIds.of(numbers), tuple(numbers)
    assert packed == plain and plain == packed and hash(packed) == hash(plain)
    assert (len(packed), tuple(packed), repr(packed)) == (len(plain), plain, repr(plain))
    assert tuple(packed[part]) == plain[part]
    assert packed + packed[part] == plain + plain[part]
    assert [packed[i] for i in range(-len(plain), len(plain))] == [*plain, *plain]
    assert all(type(number) is int for number in packed)


@given(logprobs)
def test_logprobs_come_back_bit_by_bit(numbers: list[float]) -> None:
    packed = LogProbs.of(numbers)
    for again in (packed, pickle.loads(pickle.dumps(packed)), copy.deepcopy(packed)):
        assert [n.hex() for n in again] == [float(n).hex() for n in numbers]
    assert packed == tuple(numbers)


def test_what_compares_equal_without_the_same_bytes() -> None:
    assert LogProbs.of([0.0]) == LogProbs.of([-0.0])
    assert LogProbs.of([-math.inf]) != LogProbs.of([-1.0])


@pytest.mark.parametrize("number", [2**31, -(2**31) - 1])
def test_an_id_without_room_is_refused(number: int) -> None:
    with pytest.raises(OverflowError):
        TokenIds.of([number])


def test_a_segment_packs_what_an_engine_gives() -> None:
    made = Segment(policy_version=0, token_ids=np.arange(3), logprobs=[np.float32(-0.5)] * 3)
    assert isinstance(made.token_ids, TokenIds) and isinstance(made.logprobs, LogProbs)
    assert (made.token_ids, made.logprobs) == ((0, 1, 2), (-0.5, -0.5, -0.5))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"logprobs": [None]}, r"logprobs of a segment .* not NoneType; an engine gives an id"),
        ({"token_ids": [2**31]}, r"token_ids of a segment .*greater than maximum"),
        ({"token_ids": [1.0]}, r"token_ids of a segment .*'float'"),
    ],
)
def test_what_an_engine_gives_is_refused_by_its_name(given: dict[str, Any], told: str) -> None:
    """known fault: a run with such an engine said "must be real number, not NoneType" alone."""
    with pytest.raises(RolloutError, match=told):
        Segment(**{"policy_version": 0, "token_ids": [1], "logprobs": [-0.5], **given})


def test_it_is_joined_with_its_own_kind_alone() -> None:
    with pytest.raises(TypeError):
        TokenIds.of([1]) + LogProbs.of([-1.0])


def test_a_segment_travels_in_twelve_bytes_a_token() -> None:
    number = 8192
    segment = Segment(
        policy_version=3,
        token_ids=tuple(range(100_000, 100_000 + number)),
        logprobs=tuple(-1.0 / (i + 3) for i in range(number)),
    )
    data = pickle.dumps(segment)
    assert len(data) < 12 * number + 500
    assert pickle.loads(data) == segment
    assert segment.up_to(5).token_ids == (100_000, 100_001, 100_002, 100_003, 100_004)
    assert segment.beyond(number - 1).logprobs == (-1.0 / (number + 2),)
