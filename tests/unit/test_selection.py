"""Which groups train (data/selection.py)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_apr.data.selection import select_batch
from ray_apr.types import FinishReason, GroupMeta, SampleMeta


def group(sequence, *versions):
    """A group with one sample for each (oldest) version; all end at version 9."""
    samples = tuple(
        SampleMeta(
            sample_id=f"g{sequence}-{i}",
            group_id=f"g{sequence}",
            num_prompt_tokens=2,
            num_tokens=3,
            oldest_version=version,
            newest_version=9,
            reward=0.0,
            finish_reason=FinishReason.STOP,
            num_interruptions=0,
        )
        for i, version in enumerate(versions)
    )
    return GroupMeta(group_id=f"g{sequence}", sequence=sequence, samples=samples)


def ids(groups):
    return [g.group_id for g in groups]


def select(groups, *, version, eta, batch):
    return select_batch(groups, policy_version=version, max_staleness=eta, batch_size=batch)


def test_oldest_version_first_then_arrival():
    groups = [group(0, 5, 5), group(1, 4, 5), group(2, 5, 4), group(3, 5, 5)]
    assert ids(select(groups, version=5, eta=2, batch=6).chosen) == ["g1", "g2", "g0"]


def test_nothing_is_chosen_before_the_batch_is_full():
    selection = select([group(0, 5, 5), group(1, 5, 5)], version=5, eta=0, batch=6)
    assert selection.chosen == () and selection.evicted == ()


def test_one_old_token_evicts_the_whole_group_even_if_the_batch_stays_short():
    groups = [group(0, 3, 9), group(1, 9, 9)]
    selection = select(groups, version=9, eta=5, batch=4)
    assert ids(selection.evicted) == ["g0"] and selection.chosen == ()


def test_the_bound_itself_is_trained():
    assert ids(select([group(0, 4)], version=6, eta=2, batch=1).chosen) == ["g0"]
    assert ids(select([group(0, 3)], version=6, eta=2, batch=1).evicted) == ["g0"]


def test_age_in_the_queue_counts():
    waiting = [group(0, 2)]
    assert select(waiting, version=2, eta=1, batch=2).evicted == ()
    assert ids(select(waiting, version=4, eta=1, batch=2).evicted) == ["g0"]


def test_groups_that_cannot_fill_the_batch_exactly_are_an_error():
    with pytest.raises(ValueError, match="one size"):
        select([group(0, 1, 1), group(1, 1, 1)], version=1, eta=0, batch=3)


def test_group_newer_than_the_trainer_is_an_error():
    with pytest.raises(ValueError, match="newer than the trainer"):
        select([group(0, 3)], version=2, eta=4, batch=1)


def test_empty_buffer():
    assert select([], version=3, eta=1, batch=2).chosen == ()


@given(
    st.lists(st.integers(0, 9), max_size=20),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(0, 9),
    st.randoms(),
)
def test_selection_over_any_buffer(versions, size, groups_per_batch, eta, random):
    groups = [group(i, *[v] * size) for i, v in enumerate(versions)]
    batch = size * groups_per_batch
    selection = select(groups, version=9, eta=eta, batch=batch)
    random.shuffle(groups)
    assert select(groups, version=9, eta=eta, batch=batch) == selection
    assert set(ids(selection.evicted)) == {g.group_id for g in groups if 9 - g.oldest_version > eta}
    fresh = [g for g in groups if 9 - g.oldest_version <= eta]
    if len(fresh) < groups_per_batch:
        assert selection.chosen == ()
    else:
        assert sum(len(g.samples) for g in selection.chosen) == batch
        left = [g for g in fresh if g not in selection.chosen]
        newest = max((g.oldest_version, g.sequence) for g in selection.chosen)
        assert all((g.oldest_version, g.sequence) > newest for g in left)
