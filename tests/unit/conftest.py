"""What holds for every unit test."""

from __future__ import annotations

import sys

import pytest


@pytest.fixture(autouse=True)
def starts_no_cluster():
    """Ray starts by itself where it is asked for anything, and later tests find it running."""
    yield
    ray = sys.modules.get("ray")
    assert ray is None or not ray.is_initialized(), "a unit test has started Ray"
