"""What tests of whole runs share."""

from __future__ import annotations

import pytest

from tests.processes import kill_all, marked_environment, wait_until_none


@pytest.fixture
def marked():
    """(mark, environment); fails the test if a process with the mark outlives it."""
    mark, env = marked_environment()
    try:
        yield mark, env
        left = wait_until_none(mark, 30)
        assert not left, f"processes left behind: {left}"
    finally:
        kill_all(mark)
