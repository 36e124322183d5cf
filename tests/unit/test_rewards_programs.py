"""Tests of a row, read by `code_tests`."""

from __future__ import annotations

import warnings

import pytest

from ray_apr.core.exceptions import RewardError
from ray_apr.rewards.programs import tests_of as read
from tests.reward_samples import sample_of


def test_asserts_of_siblings_are_compiled_once():
    """known fault: each call compiled them anew, and printed what the compiler warns of."""
    odd = sample_of("", tests=["assert f(1) is 20030217"])
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(3):
            assert read(odd, "tests") == ["assert f(1) is 20030217"]
    assert len(told) == 1


def test_a_test_that_is_no_python_is_refused_each_time():
    for _ in range(2):
        with pytest.raises(RewardError, match=r"neither JSON nor Python.*'assert f\('"):
            read(sample_of("", tests=["assert f("]), "tests")
