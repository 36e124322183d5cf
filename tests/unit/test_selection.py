"""Which groups train (scheduling/shelf.py)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_apr.core.group import GroupMeta, SampleMeta
from ray_apr.core.sample import FinishReason
from ray_apr.scheduling.shelf import Selection, Shelf


def group(sequence, *versions, newest=9):
    """A group with one sample for each (oldest) version; all end at version `newest`."""
    samples = tuple(
        SampleMeta(
            sample_id=f"g{sequence}-{i}",
            group_id=f"g{sequence}",
            num_prompt_tokens=2,
            num_tokens=3,
            oldest_version=version,
            newest_version=newest,
            reward=0.0,
            finish_reason=FinishReason.STOP,
            num_interruptions=0,
            version_tokens=((version, 1), (newest, 2)) if version < newest else ((version, 3),),
        )
        for i, version in enumerate(versions)
    )
    return GroupMeta(group_id=f"g{sequence}", sequence=sequence, samples=samples)


def ids(groups):
    return [g.group_id for g in groups]


def fill(groups, *, eta, batch, on_stale="evict"):
    shelf = Shelf(batch_size=batch, max_staleness=eta, on_stale=on_stale)
    for member in groups:
        shelf.add(member)
    return shelf


def select(groups, *, version, eta, batch, on_stale="evict", unfinished=None):
    return fill(groups, eta=eta, batch=batch, on_stale=on_stale).select(version, unfinished)


def test_oldest_version_first_then_arrival():
    groups = [group(0, 8, 8), group(1, 7, 8), group(2, 8, 7), group(3, 8, 8)]
    assert ids(select(groups, version=9, eta=2, batch=6).chosen) == ["g1", "g2", "g0"]


def test_nothing_is_chosen_before_the_batch_is_full():
    shelf = fill([group(0, 9, 9), group(1, 9, 9)], eta=0, batch=6)
    selection = shelf.select(9)
    assert selection.chosen == () and selection.evicted == ()
    assert shelf.num_samples == 4 and sorted(ids(shelf)) == ["g0", "g1"]


def test_one_old_token_evicts_the_whole_group_even_if_the_batch_stays_short():
    groups = [group(0, 3, 9), group(1, 9, 9)]
    selection = select(groups, version=9, eta=5, batch=4)
    assert ids(selection.evicted) == ["g0"] and selection.chosen == ()


def test_the_bound_itself_is_trained():
    assert ids(select([group(0, 4)], version=9, eta=5, batch=1).chosen) == ["g0"]
    assert ids(select([group(0, 3)], version=9, eta=5, batch=1).evicted) == ["g0"]


def test_age_in_the_queue_counts():
    shelf = fill([group(0, 2, newest=2)], eta=1, batch=2)
    assert shelf.select(2).evicted == ()
    assert shelf.select(3).evicted == ()
    assert ids(shelf.select(4).evicted) == ["g0"]
    assert shelf.num_samples == 0


def test_what_is_chosen_leaves_and_the_rest_stays():
    shelf = fill([group(i, 9, 9) for i in range(5)], eta=1, batch=4)
    assert ids(shelf.select(9).chosen) == ["g0", "g1"]
    assert ids(shelf.select(9).chosen) == ["g2", "g3"]
    assert shelf.select(9).chosen == () and ids(shelf) == ["g4"]


@pytest.mark.parametrize("on_stale", ["evict", "mask", "wait"])
def test_groups_that_cannot_fill_the_batch_exactly_are_an_error(on_stale):
    with pytest.raises(ValueError, match="one size"):
        select([group(0, 9, 9), group(1, 9, 9)], version=9, eta=0, batch=3, on_stale=on_stale)


def test_group_newer_than_the_trainer_is_an_error():
    with pytest.raises(ValueError, match="newer than the trainer"):
        select([group(0, 3, newest=3)], version=2, eta=4, batch=1)


def test_empty_shelf():
    assert select([], version=3, eta=1, batch=2) == Selection(chosen=(), evicted=())


def test_mask_trains_a_group_that_has_fresh_tokens():
    old = group(0, 3, newest=9)
    assert ids(select([old], version=9, eta=2, batch=1, on_stale="mask").chosen) == ["g0"]
    assert ids(select([old], version=9, eta=2, batch=1, on_stale="evict").evicted) == ["g0"]


def test_mask_evicts_a_group_without_any_fresh_token():
    groups = [group(0, 3, newest=6), group(1, 8, newest=8)]
    selection = select(groups, version=9, eta=2, batch=1, on_stale="mask")
    assert ids(selection.evicted) == ["g0"] and ids(selection.chosen) == ["g1"]


def test_mask_puts_back_what_does_not_fill_the_batch_after_an_eviction():
    shelf = fill([group(0, 3, newest=6), group(1, 9)], eta=2, batch=2, on_stale="mask")
    selection = shelf.select(9)
    assert ids(selection.evicted) == ["g0"] and selection.chosen == ()
    assert ids(shelf) == ["g1"] and shelf.num_samples == 1


def test_wait_holds_the_batch_for_a_group_that_is_due():
    ready = [group(0, 9), group(1, 9)]
    due = {7: 1}  # at version 9, with a bound of 2, this is its last chance
    for on_stale, chosen in (("wait", []), ("evict", ["g0"]), ("mask", ["g0"])):
        found = select(ready, version=9, eta=2, batch=1, on_stale=on_stale, unfinished=due)
        assert ids(found.chosen) == chosen
    later = select(ready, version=9, eta=2, batch=1, on_stale="wait", unfinished={8: 1})
    assert ids(later.chosen) == ["g0"], "it can still be trained in the next batch"


def test_wait_counts_how_many_are_due():
    ready, due_later = [group(0, 9), group(1, 9)], {8: 2}  # one fits into the next batch, not two
    assert not select(
        ready, version=9, eta=2, batch=1, on_stale="wait", unfinished=due_later
    ).chosen


@given(
    st.lists(st.integers(0, 9), max_size=20),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(0, 9),
    st.randoms(),
)
def test_selection_over_any_shelf(versions, size, groups_per_batch, eta, random):
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


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=20),
    st.integers(0, 9),
    st.sampled_from(["evict", "mask", "wait"]),
    st.dictionaries(st.integers(0, 9), st.integers(1, 4)),
)
def test_no_group_is_lost_or_doubled(spans, eta, on_stale, unfinished):
    groups = [group(i, min(a, b), newest=max(a, b)) for i, (a, b) in enumerate(spans)]
    shelf = fill(groups, eta=eta, batch=3, on_stale=on_stale)
    chosen = evicted = ()
    while True:
        selection = shelf.select(9, unfinished)
        evicted += selection.evicted
        chosen += selection.chosen
        assert len(selection.chosen) in (0, 3)
        if not selection.chosen:
            break
    assert sorted(ids([*chosen, *evicted, *shelf])) == sorted(ids(groups))
    for member in chosen:
        seen = member.newest_version if on_stale == "mask" else member.oldest_version
        assert 9 - seen <= eta
    assert all(9 - member.oldest_version > eta for member in evicted)
