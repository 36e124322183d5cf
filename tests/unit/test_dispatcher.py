"""What runs next (rollout/dispatcher.py); random histories are in test_state_machine.py."""

from __future__ import annotations

import time

import pytest

from ray_apr.config import PartialRolloutConfig
from ray_apr.exceptions import ConfigError, RolloutError
from ray_apr.rollout.dispatcher import Dispatcher
from ray_apr.types import SampleState


def make(
    *,
    eta=1,
    factor=None,
    batch=4,
    group=2,
    inflight=100,
    version=0,
    interrupt="weight_sync",
    live=None,
    **settings,
):
    config = PartialRolloutConfig(
        max_live_batches=live,
        max_staleness=eta,
        oversampling_factor=eta + 1 if factor is None else factor,
        interrupt=interrupt,
        **{"on_stale": "evict", **settings},
    )
    return Dispatcher(
        config, batch_size=batch, group_size=group, max_inflight=inflight, policy_version=version
    )


def admit(dispatcher, *names):
    """Add these groups, or as many as may start."""
    for name in names or range(dispatcher.num_groups_to_start()):
        size = dispatcher._group_size
        dispatcher.add_group(f"g{name}", [f"g{name}-{i}" for i in range(size)])


def start_all(dispatcher):
    started = []
    while (sample_id := dispatcher.next_start()) is not None:
        started.append(sample_id)
    return started


def complete(dispatcher, sample_ids, version=0):
    """Finish, score and hand over; returns the groups that were handed over."""
    groups = []
    for sample_id in sample_ids:
        dispatcher.on_finished(sample_id, oldest_version=version)
        group_id = dispatcher.on_scored(sample_id)
        if group_id is not None:
            dispatcher.on_buffered(group_id)
            groups.append(group_id)
    return groups


# -- admission -----------------------------------------------------------------------------------


def test_admission_is_the_smaller_of_supplementation_and_bound():
    assert make(eta=3, factor=1.5, batch=4).num_groups_to_start() == 3
    assert make(eta=1, factor=2.0, batch=4).num_groups_to_start() == 4


def test_only_whole_groups_are_admitted():
    d = make(eta=1, factor=1.5, batch=6, group=3)  # 9 samples
    assert d.num_groups_to_start() == 3
    d = make(eta=2, factor=1.25, batch=4, group=4)  # 5 samples
    assert d.num_groups_to_start() == 1


def test_finished_samples_make_room_for_supplementation_but_still_count_for_the_bound():
    d = make(eta=1, factor=1.0, batch=4)
    admit(d)
    first = start_all(d)
    assert len(first) == 4 and d.num_groups_to_start() == 0
    complete(d, first)
    assert d.num_groups_to_start() == 2
    admit(d, "x", "y")
    complete(d, start_all(d))
    assert d.counts().unfinished == 0 and d.num_groups_to_start() == 0
    assert "max_staleness is reached" in d.diagnosis()


@pytest.mark.parametrize("version", [0, 7, 1007])
def test_restored_version_does_not_open_the_gate(version):
    """AReaL#1388: counters began at 0 after a recovery, and the version did not."""
    d = make(eta=2, batch=4, version=version)
    assert d.num_groups_to_start() == 6
    d.on_buffer_counts(num_buffered=8, num_received=0, trainer_version=version)
    assert d.num_groups_to_start() == 2


@pytest.mark.parametrize("version", [0, 7])
@pytest.mark.parametrize("ack_first", [True, False])
def test_on_policy_starts_exactly_one_batch_for_each_version(version, ack_first):
    """trl#5650: a bound of 0 scheduled nothing at all."""
    d = make(eta=0, batch=4, version=version)
    received = 0
    for step in range(3):
        assert d.num_groups_to_start() == 2
        admit(d, *(f"{step}-{i}" for i in range(2)))
        complete(d, start_all(d), version + step)
        received += 4
        d.on_buffer_counts(num_buffered=4, num_received=received, trainer_version=version + step)
        assert d.num_groups_to_start() == 0
        done = {"num_buffered": 0, "num_received": received, "trainer_version": version + step + 1}
        if ack_first:
            d.on_buffer_counts(**done)
            assert d.num_groups_to_start() == 0  # the engines still have the old weights
            d.on_version(version + step + 1)
        else:
            d.on_version(version + step + 1)
            d.on_buffer_counts(**done)


def test_report_that_crosses_with_a_hand_over_counts_it_once():
    d = make(eta=1, batch=4)
    admit(d, "a", "b")
    complete(d, start_all(d))
    d.on_buffer_counts(num_buffered=2, num_received=2, trainer_version=0)
    assert d.counts().buffered == 4
    d.on_buffer_counts(num_buffered=4, num_received=4, trainer_version=0)
    assert d.counts().buffered == 4


def test_report_that_overtakes_the_hand_over_counts_it_once():
    d = make(eta=1, batch=4)
    admit(d, "a")
    for sample_id in start_all(d):
        d.on_finished(sample_id, oldest_version=0)
        d.on_scored(sample_id)
    d.on_buffer_counts(num_buffered=2, num_received=2, trainer_version=0)
    assert d.counts().live == 2
    d.on_buffered("ga")
    assert d.counts().live == d.counts().buffered == 2


def test_plain_report_is_taken_as_it_is():
    d = make(eta=1, batch=4)
    d.on_buffer_counts(num_buffered=6)
    assert d.counts().buffered == 6
    d.on_version(1)  # the step between the versions trained a batch
    assert d.counts().buffered == 2


# -- order ---------------------------------------------------------------------------------------


def test_interrupted_samples_resume_before_new_ones_oldest_version_first():
    d = make(eta=4, batch=8, version=5)
    admit(d, "a", "b", "c")
    for _ in range(4):
        d.next_start()
    d.on_interrupted("ga-0", oldest_version=5)
    d.on_interrupted("ga-1", oldest_version=3)
    d.on_interrupted("gb-0", oldest_version=4)
    d.on_interrupted("gb-1", oldest_version=3)
    assert start_all(d) == ["ga-1", "gb-1", "gb-0", "ga-0", "gc-0", "gc-1"]


def test_abort_without_a_token_puts_the_sample_back_in_front():
    d = make(eta=3)
    admit(d, "a", "b")
    assert [d.next_start(), d.next_start()] == ["ga-0", "ga-1"]
    d.on_interrupted("ga-1", oldest_version=None)
    d.on_interrupted("ga-0", oldest_version=None)
    assert d.state_of("ga-0") is SampleState.WAITING
    assert start_all(d) == ["ga-0", "ga-1", "gb-0", "gb-1"]
    counts = d.counts()
    assert counts.interruptions_total == counts.resumptions_total == 0


def test_resumed_sample_that_is_aborted_without_a_new_token_stays_interrupted():
    d = make()
    admit(d, "a")
    d.next_start()
    d.on_interrupted("ga-0", oldest_version=0)
    assert d.next_start() == "ga-0" and d.is_resumed("ga-0")
    d.on_interrupted("ga-0", oldest_version=None)
    assert d.state_of("ga-0") is SampleState.INTERRUPTED
    assert (d.counts().interruptions_total, d.counts().resumptions_total) == (2, 1)


def test_retry_keeps_the_tokens_and_the_place():
    d = make(eta=3)
    admit(d, "a", "b")
    d.next_start(), d.next_start()
    d.on_interrupted("ga-1", oldest_version=0)
    assert d.next_start() == "ga-1"
    d.on_retry("ga-1")
    d.on_retry("ga-0")
    assert d.state_of("ga-1") is SampleState.INTERRUPTED
    assert d.state_of("ga-0") is SampleState.WAITING
    assert start_all(d)[:2] == ["ga-1", "ga-0"]


def test_no_more_in_flight_than_allowed():
    d = make(inflight=3)
    admit(d)
    assert len(start_all(d)) == 3
    d.on_finished("g0-0")
    assert start_all(d) == ["g1-1"]


# -- groups --------------------------------------------------------------------------------------


def test_group_goes_to_the_buffer_when_its_last_member_is_scored():
    d = make()
    admit(d, "a")
    start_all(d)
    d.on_finished("ga-1", oldest_version=0)
    assert d.on_scored("ga-1") is None
    with pytest.raises(RolloutError, match="1 of 2 rewards"):
        d.on_buffered("ga")
    d.on_finished("ga-0", oldest_version=0)
    assert d.on_scored("ga-0") == "ga"
    assert d.members_of("ga") == ("ga-0", "ga-1")
    d.on_buffered("ga")
    assert "ga-0" not in d and d.counts().buffered == 2


def group_of_mixed_states(**settings):
    """Group a: finished, scored, interrupted, waiting; group b: in flight."""
    d = make(group=4, batch=8, **settings)
    admit(d, "a", "b")
    for _ in range(3):
        d.next_start()
    d.on_finished("ga-0", oldest_version=d.policy_version)
    d.on_finished("ga-1", oldest_version=d.policy_version)
    d.on_scored("ga-1")
    d.on_interrupted("ga-2", oldest_version=d.policy_version)
    return d


def test_failed_member_drops_the_whole_group_whatever_its_states():
    d = group_of_mixed_states()
    assert d.next_start() == "ga-2"
    assert d.on_failed("ga-0") == ("ga-0", "ga-1", "ga-2", "ga-3")
    counts = d.counts()
    assert (counts.live, counts.waiting, counts.inflight) == (4, 4, 0)
    assert start_all(d) == ["gb-0", "gb-1", "gb-2", "gb-3"]


def test_filter_drops_the_whole_group():
    d = group_of_mixed_states()
    assert len(d.on_filtered("ga")) == 4
    assert "ga-0" not in d and d.counts().live == 4


def test_dropped_group_makes_room_for_another():
    d = make(eta=0, batch=4)
    admit(d)
    start_all(d)
    assert d.num_groups_to_start() == 0
    d.on_failed("g0-1")
    assert d.num_groups_to_start() == 1


def test_group_of_mixed_states_is_evicted_whole_one_step_after_the_bound():
    d = group_of_mixed_states(eta=2, version=7)
    assert d.on_version(8) == () and d.on_version(9) == ()
    assert d.on_version(10) == ("ga",)
    assert "ga-3" not in d and d.counts().live == 4
    assert start_all(d) == ["gb-0", "gb-1", "gb-2", "gb-3"]


def test_resumed_member_in_flight_is_evicted_with_its_group():
    d = make(eta=1)
    admit(d, "a")
    d.next_start()
    d.on_interrupted("ga-0", oldest_version=0)
    assert d.next_start() == "ga-0"
    assert d.on_version(2) == ("ga",)
    assert d.counts().inflight == 0
    with pytest.raises(RolloutError, match="not live"):
        d.on_finished("ga-0")


def test_old_tokens_that_arrive_late_are_found_by_evict_stale():
    d = make(eta=1)
    admit(d, "a")
    start_all(d)
    assert d.on_version(2) == ()
    d.on_interrupted("ga-0", oldest_version=0)
    assert d.evict_stale() == ("ga",)
    assert d.evict_stale() == ()


def test_tokens_newer_than_the_last_told_version_are_not_stale():
    d = make(eta=0)
    admit(d, "a")
    start_all(d)
    d.on_interrupted("ga-0", oldest_version=1)  # the engines were faster than the news
    assert d.evict_stale() == () and d.on_version(1) == ()


def test_complete_group_is_left_to_the_buffer():
    d = make(eta=0)
    admit(d, "a")
    for sample_id in start_all(d):
        d.on_finished(sample_id, oldest_version=0)
        d.on_scored(sample_id)
    assert d.on_version(3) == ()
    d.on_buffered("ga")


def test_version_never_goes_back():
    d = make(version=3)
    d.on_version(3)
    with pytest.raises(RolloutError, match="from 3 to 2"):
        d.on_version(2)


# -- batch_full ----------------------------------------------------------------------------------


def full_batch():
    d = make(eta=1, batch=4, interrupt="batch_full")
    admit(d)
    running = start_all(d)
    complete(d, running[:4])
    return d, running[4:]


def test_full_batch_interrupts_what_runs_once_and_holds_the_rest():
    d, running = full_batch()
    assert d.is_held and "held until the next version" in d.diagnosis()
    assert d.to_interrupt() == tuple(running) and d.to_interrupt() == ()
    for sample_id in running:
        d.on_interrupted(sample_id, oldest_version=0)
    assert d.next_start() is None
    d.on_version(1)
    assert start_all(d) == running
    assert d.to_interrupt() == ()


def test_sample_that_ends_before_its_abort_is_finished():
    d, running = full_batch()
    d.to_interrupt()
    d.on_finished(running[0], oldest_version=0)
    with pytest.raises(RolloutError, match="finished, not inflight"):
        d.on_interrupted(running[0], oldest_version=0)
    assert d.on_scored(running[0]) is None


def test_hold_ends_when_the_batch_is_lost():
    d, running = full_batch()
    assert d.to_interrupt()
    d.on_buffer_counts(num_buffered=2, num_received=4, trainer_version=0)
    assert not d.is_held
    d.on_interrupted(running[0], oldest_version=0)
    assert d.next_start() == running[0]
    d.on_buffer_counts(num_buffered=4, num_received=4, trainer_version=0)
    assert d.to_interrupt()  # full anew


def test_trained_batch_does_not_hold_the_next_version_before_it_is_acknowledged():
    d, _ = full_batch()
    d.on_buffer_counts(num_buffered=4, num_received=4, trainer_version=0)
    d.on_version(1)
    d.on_buffer_counts(num_buffered=4, num_received=4, trainer_version=0)  # sent before the ack
    assert not d.is_held and d.to_interrupt() == ()


@pytest.mark.parametrize("interrupt", ["never", "weight_sync"])
def test_other_modes_never_interrupt_for_a_full_batch(interrupt):
    d = make(eta=1, batch=4, interrupt=interrupt)
    admit(d)
    running = start_all(d)
    complete(d, running[:4])
    assert not d.is_held and d.to_interrupt() == ()


# -- events that do not fit ----------------------------------------------------------------------


def test_duplicate_events_raise_and_change_nothing():
    d = make()
    admit(d, "a")
    start_all(d)
    d.on_finished("ga-0", oldest_version=0)
    d.on_scored("ga-0")
    d.on_interrupted("ga-1", oldest_version=0)
    before = d.counts()
    for event in (
        lambda: d.on_finished("ga-0"),
        lambda: d.on_scored("ga-0"),
        lambda: d.on_interrupted("ga-0", oldest_version=0),
        lambda: d.on_retry("ga-0"),
        lambda: d.on_interrupted("ga-1", oldest_version=0),
        lambda: d.on_finished("ga-1"),
        lambda: d.on_scored("ga-1"),
        lambda: d.on_retry("ga-1"),
    ):
        with pytest.raises(RolloutError):
            event()
    assert d.counts() == before


def test_unknown_ids_raise():
    d = make()
    for call in (d.state_of, d.is_resumed, d.on_failed, d.on_retry, d.on_scored, d.on_finished):
        with pytest.raises(RolloutError, match="sample x is not live"):
            call("x")
    for call in (d.members_of, d.on_buffered, d.on_filtered):
        with pytest.raises(RolloutError, match="group x is not live"):
            call("x")


def test_first_version_of_a_sample_never_changes():
    d = make(version=5)
    admit(d, "a")
    d.next_start()
    d.on_interrupted("ga-0", oldest_version=4)
    d.next_start()
    with pytest.raises(RolloutError, match="5 now, 4 before"):
        d.on_interrupted("ga-0", oldest_version=5)
    assert d.state_of("ga-0") is SampleState.INFLIGHT


@pytest.mark.parametrize("ids", [["a"], ["a", "a"], ["a", "b", "c"], ["a", "known-0"]])
def test_groups_that_cannot_be_admitted(ids):
    d = make()
    d.add_group("known", ["known-0", "known-1"])
    with pytest.raises(RolloutError):
        d.add_group("new", ids)
    with pytest.raises(RolloutError):
        d.add_group("known", ["a", "b"])
    assert d.counts().live == 2


@pytest.mark.parametrize(
    ("batch", "group", "inflight"), [(0, 2, 1), (3, 2, 1), (4, 0, 1), (4, 2, 0)]
)
def test_senseless_sizes_are_refused(batch, group, inflight):
    with pytest.raises(ConfigError):
        make(batch=batch, group=group, inflight=inflight)


def test_diagnosis_names_who_waits_for_what():
    d = make(eta=1, batch=4)
    admit(d)
    running = start_all(d)
    for sample_id in running[:4]:
        d.on_finished(sample_id, oldest_version=0)
    d.on_interrupted(running[4], oldest_version=0)
    assert d.diagnosis() == (
        "2 of 4 groups wait for reward, 3 samples in flight (at most 100), 1 interrupted, "
        "0 waiting, 0 buffered of the 4 of a batch at version 0; "
        "no group may start (max_staleness is reached)"
    )


def test_diagnosis_says_that_the_filter_keeps_nothing():
    """A filter that drops every group runs for ever: everything moves, and no batch comes."""
    d = make(eta=1, batch=4)
    admit(d)
    start_all(d)
    for sample_id in ("g0-0", "g0-1", "g1-0", "g1-1", "g2-0", "g2-1"):
        d.on_finished(sample_id, oldest_version=0)
        d.on_scored(sample_id)
    d.on_filtered("g0")
    d.on_filtered("g1")
    assert "the last 2 groups were filtered, none was kept" in d.diagnosis()
    d.on_buffered("g2")
    assert "filtered" not in d.diagnosis()


def test_a_decision_does_not_cost_more_with_more_in_flight():
    """100 times as many samples: a decision may cost its logarithm more, not 100 times."""

    def seconds_a_decision(num_samples):
        d = make(eta=1, batch=num_samples, group=1, inflight=num_samples, factor=1.0)
        admit(d)
        start_all(d)
        begin = time.perf_counter()
        for i in range(200):
            d.on_interrupted(f"g{i}-0", oldest_version=0)
            d.num_groups_to_start()
            d.next_start()
            d.on_version(0)
        return time.perf_counter() - begin

    few = min(seconds_a_decision(200) for _ in range(3))
    many = min(seconds_a_decision(20_000) for _ in range(3))
    assert many < 20 * few


def test_no_group_starts_while_enough_batches_are_alive():
    d = make(eta=4, batch=4, factor=2, live=1.5)
    admit(d)
    started = start_all(d)
    assert len(started) == 6, "1.5 batches, although supplementation asks for 2"
    complete(d, started[:4])
    assert d.num_groups_to_start() == 0
    assert "max_live_batches is reached" in d.diagnosis()
    d.on_buffer_counts(num_buffered=0, num_received=4, trainer_version=1)
    d.on_version(1)
    assert d.num_groups_to_start() == 2


# -- the settings of the modes ---------------------------------------------------------------


def interrupt_all(dispatcher, sample_ids, *, version=0, tokens=1):
    for sample_id in sample_ids:
        dispatcher.on_interrupted(sample_id, oldest_version=version, num_tokens=tokens)


def test_mask_never_evicts_a_group_that_still_generates_and_leaves_room_beside_it():
    d = make(eta=1, batch=4, factor=2, on_stale="mask")
    admit(d, "long")
    started = start_all(d)
    interrupt_all(d, started)
    d.on_version(5)
    assert d.evict_stale() == ()
    assert set(start_all(d)) == set(started)
    assert d.num_groups_to_start() == 3, "6 of 8: the bound is about samples that are within it"


def test_evict_drops_what_mask_keeps():
    d = make(eta=1, batch=4, factor=2, on_stale="evict")
    admit(d, "long")
    interrupt_all(d, start_all(d))
    assert d.on_version(5) == ("glong",)


def test_restart_forgets_the_age_of_a_sample_and_of_its_group():
    d = make(eta=0, batch=2, factor=2, interrupt="batch_full", after_interrupt="restart")
    admit(d, "a")
    started = start_all(d)
    interrupt_all(d, started)
    for sample_id in started:
        d.on_restart(sample_id)
        assert d.state_of(sample_id) is SampleState.WAITING
    assert d.on_version(1) == (), "nothing is left of version 0"
    assert start_all(d) == started
    assert not d.is_resumed(started[0])


def test_supplementation_beyond_the_bound_needs_interruption_without_tokens():
    restarts = make(eta=0, batch=4, factor=3, interrupt="batch_full", after_interrupt="restart")
    assert restarts.num_groups_to_start() == 6
    with pytest.raises(ConfigError, match="oversampling_factor"):
        make(eta=0, batch=4, factor=3, interrupt="batch_full", after_interrupt="resume")


@pytest.mark.parametrize(
    ("order", "expected"),
    [("oldest_version", [1, 2, 0]), ("fifo", [0, 1, 2]), ("most_tokens", [2, 0, 1])],
)
def test_resume_order(order, expected):
    d = make(eta=4, batch=3, group=1, factor=1, resume_order=order)
    admit(d)
    ids = start_all(d)
    for i, (version, tokens) in enumerate([(2, 5), (0, 3), (1, 9)]):
        d.on_interrupted(ids[i], oldest_version=version, num_tokens=tokens)
    assert start_all(d) == [ids[i] for i in expected]


def test_tail_round_resumes_long_samples_together():
    d = make(eta=4, batch=4, group=1, factor=1, tail_round=2)
    admit(d)
    a, b, *_ = start_all(d)
    interrupt_all(d, [a, b])
    assert set(start_all(d)) == {a, b}, "one interruption proves nothing"
    interrupt_all(d, [a])
    assert start_all(d) == [], "a is held back"
    interrupt_all(d, [b])
    assert set(start_all(d)) == {a, b}


def test_tail_that_is_held_back_is_released_before_it_expires():
    d = make(eta=2, batch=4, group=1, factor=1, tail_round=3)
    admit(d)
    first, *_ = start_all(d)
    interrupt_all(d, [first])
    start_all(d)
    interrupt_all(d, [first])
    d.on_version(1)
    assert start_all(d) == []
    d.on_version(2)
    assert start_all(d) == [first], "at version 3 its first token would be too old"


def test_tail_is_not_held_back_when_nothing_else_can_run():
    d = make(eta=4, batch=1, group=1, factor=1, tail_round=8)
    admit(d)
    (only,) = start_all(d)
    interrupt_all(d, [only])
    start_all(d)
    interrupt_all(d, [only])
    assert start_all(d) == [only]


def test_batch_admission_waits_until_nothing_generates_but_replaces_what_is_dropped():
    d = make(eta=1, batch=6, factor=1, admission="batch")
    admit(d)
    started = start_all(d)
    complete(d, started[:2])
    assert d.num_groups_to_start() == 0, "the rest of the batch still generates"
    d.on_failed(started[2])
    assert d.num_groups_to_start() == 1, "a dropped group is replaced at once"
    admit(d, "new")
    assert d.num_groups_to_start() == 0


def test_stream_admission_does_not_wait():
    d = make(eta=1, batch=4, factor=1)
    admit(d)
    complete(d, start_all(d)[:2])
    assert d.num_groups_to_start() == 1


def test_sync_every_holds_for_all_batches_until_the_next_sync():
    d = make(eta=1, batch=2, factor=2, interrupt="batch_full", sync_every=2)
    admit(d)
    started = start_all(d)
    complete(d, started[:2])
    assert not d.is_held, "two batches are trained before the next version"
    complete(d, started[2:])
    assert d.is_held
    d.on_buffer_counts(num_buffered=2, num_received=4, trainer_version=1)
    assert d.is_held, "the first one is trained, and the engines are still at version 0"
    d.on_buffer_counts(num_buffered=0, num_received=4, trainer_version=2)
    d.on_version(2)
    assert not d.is_held


def test_samples_are_counted_by_the_age_of_their_group():
    d = make(eta=4, batch=4)
    admit(d, "a", "b")
    assert dict(d.num_by_version) == {}, "nothing has started"
    started = start_all(d)
    assert dict(d.num_by_version) == {0: 4}
    d.on_version(2)
    for sample_id in started[:2]:
        d.on_finished(sample_id, oldest_version=1)
    assert dict(d.num_by_version) == {1: 2, 0: 2}, "what ended tells its true age"
    d.on_failed(started[2])
    assert dict(d.num_by_version) == {1: 2}


def test_starved_means_no_batch_beside_the_one_in_training():
    d = make(eta=4, batch=2)
    assert d.is_starved
    d.on_buffer_counts(num_buffered=2)
    assert d.is_starved
    d.on_buffer_counts(num_buffered=4)
    assert not d.is_starved


def test_what_full_batches_stopped_gets_a_version_of_its_own():
    settings = dict(interrupt="batch_full", after_interrupt="restart")
    d = make(eta=0, batch=4, factor=2, **settings)
    d.begin_round(1)
    assert not d.in_tail_round and d.num_groups_to_start() == 4, "beside what is new it would lose"
    d.begin_round(2)
    assert d.in_tail_round and d.num_groups_to_start() == 2, "without supplementation"
    resumes = make(eta=1, batch=4, factor=2)
    resumes.begin_round(2)
    assert not resumes.in_tail_round and resumes.num_groups_to_start() == 4
