"""Each setting of `PartialRolloutConfig` is obeyed: with and without it, something differs."""

from __future__ import annotations

import dataclasses

import pytest

from ray_apr.config import PartialRolloutConfig
from ray_apr.core.group import GroupMeta
from ray_apr.tools.simulator.run import Simulation
from tests.schedules import Driven, prompt
from tests.traces import make_cluster, make_trace


class Watched(Simulation):
    """Notes what is trained, and how much is under way at once."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.trained: list[tuple[int, GroupMeta]] = []
        self.most_inflight = self.most_live = 0

    def _begin_step(self, grant):
        self.trained += [(self._version, group) for group in grant.groups]
        super()._begin_step(grant)

    def _pump(self):
        super()._pump()
        self.most_inflight = max(self.most_inflight, self._fleet.num_calls)
        self.most_live = max(self.most_live, self._scheduler.counts().live)

    @property
    def samples(self):
        return [sample for _, group in self.trained for sample in group.samples]


def simulate(mode="apr", *, trace=None, cluster=None, **overrides):
    config = PartialRolloutConfig.preset(mode, **overrides)
    run = Watched(trace or make_trace(), cluster or make_cluster(), config)
    run.run()
    return run, run.outcome


def make_scheduler(**overrides):
    config = PartialRolloutConfig(**overrides)
    return Driven(config, batch_size=4, group_size=2, max_inflight=100)


def interrupt(scheduler, sample_id, *, version=0, tokens=5):
    scheduler.interrupt(sample_id, version, tokens)


@pytest.mark.parametrize("bound", [1, 2, 4])
def test_max_staleness(bound):
    _, outcome = simulate(max_staleness=bound, max_live_batches=None)
    assert outcome.staleness_max == bound


@pytest.mark.parametrize(("factor", "groups"), [(1.0, 2), (1.5, 3), (2.0, 4), (3.0, 6)])
def test_oversampling_factor(factor, groups):
    assert make_scheduler(oversampling_factor=factor).num_room == groups


def test_admission():
    for admission, groups in (("stream", 1), ("batch", 0)):
        scheduler = make_scheduler(admission=admission)
        scheduler.admit_some()
        scheduler.start_all()
        scheduler.complete(["g0-0", "g0-1"])
        assert scheduler.num_room == groups


def test_interrupt():
    _, never = simulate(interrupt="never")
    _, at_sync = simulate(interrupt="weight_sync")
    assert never.interrupted == 0 and at_sync.interrupted > 0
    for when, aborted in (("batch_full", 4), ("weight_sync", 0)):
        scheduler = make_scheduler(interrupt=when)
        scheduler.admit_some()
        scheduler.start_all()
        for group_id in ("g0", "g1"):
            scheduler.complete([f"{group_id}-0", f"{group_id}-1"])
        assert scheduler.is_held == (when == "batch_full")
        assert len(scheduler.full_aborts()) == aborted


def test_after_interrupt():
    found = {
        after: simulate(after_interrupt=after)[1] for after in ("resume", "restart", "discard")
    }
    assert found["resume"].resumed > 0
    assert found["restart"].resumed == found["discard"].resumed == 0
    for after, reason in (("restart", "restarted"), ("discard", "surplus")):
        assert found[after].ledger.discarded[reason] > 0
        assert found["resume"].ledger.discarded[reason] == 0


def test_drain():
    drained, _ = simulate("in_flight", drain=True)
    frozen, _ = simulate("in_flight", drain=False)
    assert all(len(sample.version_tokens) == 1 for sample in drained.samples)
    assert any(len(sample.version_tokens) > 1 for sample in frozen.samples)


@pytest.mark.parametrize("mode", ["apr", "in_flight"])
def test_kv_cache(mode):
    roomy = make_cluster(
        rollout_gpus=1,  # or what was interrupted may go on at an engine without its entries
        engine=dataclasses.replace(make_cluster().engine, kv_capacity_tokens=10**6),
    )
    _, kept = simulate(mode, cluster=roomy, kv_cache="keep")
    _, recomputed = simulate(mode, cluster=roomy, kv_cache="recompute")
    assert kept.tokens_reprefilled == 0 < recomputed.tokens_reprefilled


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("oldest_version", ["g2-0", "g0-0", "g1-0"]),
        ("fifo", ["g1-0", "g0-0", "g2-0"]),
        ("most_tokens", ["g0-0", "g2-0", "g1-0"]),
    ],
)
def test_resume_order(order, expected):
    scheduler = make_scheduler(resume_order=order, oversampling_factor=2.0)
    scheduler.admit_some()
    scheduler.start_all()
    scheduler.on_version(3)
    for sample_id, version, tokens in (("g1-0", 2, 1), ("g0-0", 1, 9), ("g2-0", 0, 5)):
        interrupt(scheduler, sample_id, version=version, tokens=tokens)
    assert scheduler.start_all() == expected


def test_tail_round():
    for tail_round, resumed in ((None, ["g0-0"]), (2, [])):
        scheduler = make_scheduler(tail_round=tail_round)
        scheduler.admit_some()
        scheduler.start_all()
        interrupt(scheduler, "g0-0")
        assert scheduler.next_start() == "g0-0", "the first interruption proves nothing"
        interrupt(scheduler, "g0-0")
        assert scheduler.start_all() == resumed
    interrupt(scheduler, "g1-0")
    scheduler.next_start()
    interrupt(scheduler, "g1-0")
    assert scheduler.start_all() == ["g0-0", "g1-0"], "the round is full"


def test_tail_round_ends_at_the_edge_of_the_bound():
    scheduler = make_scheduler(tail_round=50, max_staleness=2)
    scheduler.admit_some()
    scheduler.start_all()
    interrupt(scheduler, "g0-0")
    scheduler.next_start()
    interrupt(scheduler, "g0-0")
    scheduler.on_version(1)
    assert scheduler.next_start() is None
    scheduler.on_version(2)
    assert scheduler.next_start() == "g0-0"


def test_on_stale():
    tail = make_trace(tail=(900, 1400), seed=3)
    long = make_cluster(steps=24)
    lost = {
        on_stale: simulate(trace=tail, cluster=long, max_staleness=1, on_stale=on_stale)[1]
        for on_stale in ("evict", "mask", "wait")
    }
    lost = {on_stale: outcome.ledger.discarded for on_stale, outcome in lost.items()}
    assert lost["evict"]["stale"] > 0 == lost["evict"]["masked"]
    assert lost["mask"]["masked"] > 0
    assert sum(lost["wait"].values()) == 0


@pytest.mark.parametrize("sync_every", [1, 2, 3])
def test_sync_every(sync_every):
    run, _ = simulate(sync_every=sync_every)
    versions = {version for sample in run.samples for version, _ in sample.version_tokens}
    assert len(versions) > 1 and all(version % sync_every == 0 for version in versions)


def test_batches_per_step():
    one, _ = simulate()
    two, outcome = simulate(batches_per_step=2)
    assert len(two.samples) == 2 * len(one.samples)
    assert len(outcome.step_ends) == make_cluster().steps


def test_overlap_sync():
    slow = make_cluster(weight_sync_s=3.0)
    _, overlapped = simulate("in_flight", cluster=slow, overlap_sync=True)
    _, apart = simulate("in_flight", cluster=slow, overlap_sync=False)
    assert overlapped.wall_s < apart.wall_s - 3.0


def test_max_inflight():
    fixed, _ = simulate(max_inflight=7)
    assert fixed.most_inflight == 7
    whole, _ = simulate(max_inflight=None)
    assert whole.most_inflight == 64  # ceil(2.0 * 32)
    tight = make_cluster(
        engine=dataclasses.replace(make_cluster().engine, kv_capacity_tokens=2500), steps=24
    )
    _, without = simulate(cluster=tight, max_inflight=None)
    _, adaptive = simulate(cluster=tight, max_inflight="adaptive")
    assert adaptive.preempted < without.preempted / 2


@pytest.mark.parametrize(("batches", "live"), [(1.0, 32), (2.0, 64), (3.0, 96), (None, 160)])
def test_max_live_batches(batches, live):
    run, _ = simulate(max_live_batches=batches, on_stale="evict")
    assert live - 32 < run.most_live <= live


def test_overlap_rewards():
    slow = make_trace(reward_s=6.0)
    _, overlapped = simulate("one_step_off", trace=slow, overlap_rewards=True)
    _, after_all = simulate("one_step_off", trace=slow, overlap_rewards=False)
    assert overlapped.wall_s < after_all.wall_s


def test_filter_zero_variance():
    _, unfiltered = simulate()
    run, filtered = simulate(filter_zero_variance=True)
    assert unfiltered.ledger.discarded["filtered"] == 0 < filtered.ledger.discarded["filtered"]
    assert len(run.trained) == 8 * 8, "each one is replaced"
    assert all(len({s.reward for s in group.samples}) == 2 for _, group in run.trained)


@pytest.mark.parametrize("retries", [0, 1, 3])
def test_max_filter_retries(retries):
    config = PartialRolloutConfig(filter_zero_variance=True, max_filter_retries=retries)
    scheduler = Driven(config, batch_size=4, group_size=2, max_inflight=9)
    scheduler.admit(prompt("p"))
    tries = 0
    while scheduler.live.groups:
        tries += 1
        assert scheduler.complete(scheduler.start_all()) == [], "a group without a signal"
        scheduler.tick(lambda: None, starts=False)
    assert tries == 1 + retries


def test_batch_full_with_wait_does_not_stand_still():
    """The trainer waits for a group that may not go on, as the batch is full."""
    tail = make_trace(tail=(900, 1400), seed=3)
    for after in ("resume", "restart", "discard"):
        _, outcome = simulate(
            trace=tail,
            interrupt="batch_full",
            on_stale="wait",
            after_interrupt=after,
            max_staleness=1,
        )
        assert outcome.ledger.discarded["stale"] == 0


def test_stream_trains_long_groups_in_rounds_of_their_own():
    tail = make_trace(tail=(900, 1400), seed=3)
    run, outcome = simulate("stream", trace=tail, cluster=make_cluster(steps=12))
    longest = {
        version: max(s.num_tokens for v, g in run.trained if v == version for s in g.samples)
        for version, _ in run.trained
    }
    num_long = sum(length >= 900 for length in longest.values())
    assert 1 <= num_long <= 3, "long groups are trained, and together: most rounds stay short"
    assert outcome.ledger.error == 0
