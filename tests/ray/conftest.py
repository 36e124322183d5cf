"""What tests of whole runs share."""

from __future__ import annotations

import pytest

from tests.processes import marked_processes


@pytest.fixture
def marked():
    """(mark, environment); fails the test if a process with the mark outlives it."""
    with marked_processes() as mark_and_env:
        yield mark_and_env
