"""Version arithmetic (staleness.py)."""

from __future__ import annotations

import pytest

from ray_apr.staleness import (
    is_stale,
    num_untrained,
    staleness,
    staleness_capacity,
    supplementation_capacity,
)


@pytest.mark.parametrize(("trainer", "oldest", "age"), [(0, 0, 0), (5, 2, 3), (1009, 1007, 2)])
def test_staleness_counts_from_the_oldest_token(trainer, oldest, age):
    assert staleness(trainer, oldest) == age


def test_sample_newer_than_the_trainer_is_an_error():
    with pytest.raises(ValueError, match="version 3 is newer than the trainer at 2"):
        staleness(2, 3)


@pytest.mark.parametrize("eta", [0, 1, 4])
def test_the_bound_itself_is_still_trained(eta):
    assert not is_stale(10, 10 - eta, eta)
    assert is_stale(10, 10 - eta - 1, eta)


def test_staleness_capacity_is_the_published_formula():
    # AReaL eq. 3 with eta=2, B=8, version 0, nothing running -> 24.
    assert staleness_capacity(batch_size=8, max_staleness=2, num_live=0) == 24


@pytest.mark.parametrize("version", [0, 1, 7])
def test_staleness_capacity_equals_areal_when_each_version_trained_a_batch(version):
    batch, eta, live = 8, 2, 11
    accepted_and_running = version * batch + live
    areal = (eta + version + 1) * batch - accepted_and_running
    assert staleness_capacity(batch_size=batch, max_staleness=eta, num_live=live) == areal


def test_bound_zero_admits_exactly_one_batch():
    assert staleness_capacity(batch_size=8, max_staleness=0, num_live=0) == 8
    assert staleness_capacity(batch_size=8, max_staleness=0, num_live=8) == 0


def test_capacities_are_never_negative():
    assert staleness_capacity(batch_size=8, max_staleness=0, num_live=9) == 0
    assert supplementation_capacity(batch_size=8, oversampling_factor=1, num_unfinished=9) == 0


def test_supplementation_rounds_up():
    assert supplementation_capacity(batch_size=3, oversampling_factor=1.5, num_unfinished=1) == 4


@pytest.mark.parametrize(
    ("trainer", "engines", "expected"),
    [
        pytest.param(4, 4, 10, id="in step"),
        pytest.param(5, 4, 18, id="acknowledged, not yet synced: the batch stays live"),
        pytest.param(3, 4, 2, id="synced, not yet acknowledged: the batch is gone"),
    ],
)
def test_untrained_samples_are_seen_at_the_version_of_the_engines(trainer, engines, expected):
    seen = num_untrained(
        num_buffered=10, batch_size=8, trainer_version=trainer, policy_version=engines
    )
    assert seen == expected
    assert num_untrained(num_buffered=0, batch_size=8, trainer_version=0, policy_version=3) == 0
