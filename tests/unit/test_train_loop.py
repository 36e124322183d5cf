from __future__ import annotations

import dataclasses

import pytest

from ray_apr.exceptions import TrainError
from ray_apr.train.checkpoint import Progress
from ray_apr.train.loop import check_batch
from tests.train_batches import make_batches, make_samples

PROGRESS = Progress(step=4, policy_version=3)


@pytest.fixture
def row():
    """Samples of the versions 0 to 2, for step 4 at version 3."""
    (made,) = make_batches(make_samples(), step=4, policy_version=3)
    assert min(made.token_versions) == 0
    return made


def test_a_batch_within_the_bound_is_taken(row):
    check_batch(row, PROGRESS, max_staleness=3)


def test_a_sample_beyond_the_bound_is_refused(row):
    with pytest.raises(TrainError, match="version 0, beyond max_staleness = 2"):
        check_batch(row, PROGRESS, max_staleness=2)


def test_masked_tokens_may_be_of_any_age():
    (row,) = make_batches(make_samples(), step=4, policy_version=3, oldest_version=1)
    assert min(row.token_versions) == 0
    check_batch(row, PROGRESS, max_staleness=2)
    with pytest.raises(TrainError, match="version 1, beyond max_staleness = 1"):
        check_batch(row, PROGRESS, max_staleness=1)


@pytest.mark.parametrize("change", [{"step": 5}, {"policy_version": 4}])
def test_the_row_of_another_step_is_refused(row, change):
    with pytest.raises(TrainError, match="expected the batch of step 4 at version 3"):
        check_batch(dataclasses.replace(row, **change), PROGRESS, max_staleness=9)
