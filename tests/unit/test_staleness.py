"""Version arithmetic (staleness.py)."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_apr.core.staleness import (
    is_stale,
    leaves_none_behind,
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


@pytest.mark.parametrize(
    ("ready", "unfinished", "batch", "expected"),
    [
        ({5: 4}, {}, 4, True),  # nothing is waited for
        ({5: 4}, {3: 1}, 4, False),  # 3 is the oldest that may be trained at 5: it is due now
        ({5: 4}, {4: 4}, 4, True),  # due at the next batch, which has room for it
        ({5: 4}, {4: 5}, 4, False),  # one more than that has room for
        ({5: 4}, {4: 4, 5: 4}, 4, True),
        ({5: 3}, {4: 4, 5: 6}, 4, False),  # nine for the two batches after this one
        ({3: 4}, {3: 1}, 4, True),  # this batch is full of what is due; one is lost anyway
        ({3: 2, 5: 2}, {3: 1}, 4, False),
        ({3: 3, 5: 1}, {}, 4, True),
        ({}, {3: 1}, 4, False),
        ({}, {}, 4, True),
        ({5: 4}, {1: 1}, 4, False),  # what is past the bound counts as due
    ],
)
def test_the_trainer_waits_exactly_for_what_would_expire(ready, unfinished, batch, expected):
    """At version 5 with a bound of 2."""
    found = leaves_none_behind(
        ready, unfinished, policy_version=5, max_staleness=2, batch_size=batch
    )
    assert found == expected


@given(st.integers(1, 4), st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=12))
def test_leaving_none_behind_is_earliest_deadline_first(batch, drawn):
    """At version 8 with a bound of 2, wherever every sample can be trained in time at all."""
    drawn = [(0, True)] * batch + drawn[: 2 * batch]
    versions = [min(8, 6 + place // batch + slack) for place, (slack, _) in enumerate(drawn)]
    ready = Counter(v for v, (_, is_ready) in zip(versions, drawn, strict=True) if is_ready)
    unfinished = Counter(
        v for v, (_, is_ready) in zip(versions, drawn, strict=True) if not is_ready
    )
    taken = sorted(ready.elements())[:batch]
    left = sorted((Counter(versions) - Counter(taken)).elements())
    in_time = all(9 + place // batch - v <= 2 for place, v in enumerate(left))
    assert in_time == leaves_none_behind(
        ready, unfinished, policy_version=8, max_staleness=2, batch_size=batch
    )
