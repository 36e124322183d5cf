"""A user's resume order and admission rule (scheduling/{resume_order,admission}.py)."""

from __future__ import annotations

import pytest

from ray_apr.config import PartialRolloutConfig
from ray_apr.core.exceptions import ConfigError, RolloutError
from ray_apr.scheduling.admission import Room
from ray_apr.tools.simulator.run import Simulation
from tests.schedules import Driven
from tests.traces import make_cluster, make_trace


class NewestFirst:
    """The sample that was admitted last goes on first."""

    def __call__(self, live):
        return -live.order


class AtMostUnfinished:
    """No more than 8 samples have not ended."""

    def __call__(self, load):
        left = (8 - load.num_unfinished) // load.group_size
        return Room(max(0, left), "8 samples generate")


def make(**rules):
    config = PartialRolloutConfig(max_staleness=4, **rules)
    return Driven(config, batch_size=8, group_size=2, max_inflight=100)


def test_a_resume_order_of_the_users_ranks_what_goes_on():
    d = make(resume_order=NewestFirst)
    d.admit_some("a", "b")
    started = d.start_all()
    for sample_id in started:
        d.interrupt(sample_id)
    assert d.start_all() == started[::-1]


@pytest.mark.parametrize("room", [1, Room(0.5)])
def test_an_admission_rule_that_gives_no_room_is_named(room):
    d = make(admission=lambda load: room)
    with pytest.raises(RolloutError, match="admission rule failed, or gave no Room"):
        d.room()


def test_an_admission_rule_of_the_users_binds_and_says_so():
    d = make(admission=AtMostUnfinished())
    d.admit_some()
    assert d.counts().unfinished == 8
    assert "no group may start (8 samples generate)" in d.diagnosis()


def test_no_rule_goes_beyond_the_limits_of_the_settings():
    d = make(admission=lambda load: Room(10**9))
    d.admit_some()
    assert d.counts().unfinished == 16, "oversampling_factor 2.0"
    assert "no group may start (oversampling_factor is reached)" in d.diagnosis()


def test_a_simulated_run_obeys_both():
    def run(**rules):
        config = PartialRolloutConfig.preset("apr", **rules)
        return Simulation(make_trace(), make_cluster(), config).run()

    plain, ruled = run(), run(resume_order=NewestFirst, admission=AtMostUnfinished)
    assert ruled.ledger.error == 0 and len(ruled.step_ends) == len(plain.step_ends)
    assert ruled.wall_s > plain.wall_s, "two groups at a time"
    assert run(resume_order=NewestFirst).ledger != plain.ledger


def test_ranks_that_do_not_compare_are_named():
    ranks = iter([(0,), (1, "a"), (1, 2)])
    d = make(resume_order=lambda live: next(ranks))
    d.admit_some("a", "b")
    for sample_id in d.start_all()[:3]:
        d.interrupt(sample_id)
    with pytest.raises(RolloutError, match="ranks of the resume order do not compare"):
        d.start_all()


def test_an_order_that_raises_names_itself_and_the_sample():
    d = make(resume_order=lambda live: live.nothing)
    d.admit_some("a")
    (first, *_) = d.start_all()
    with pytest.raises(RolloutError, match="the resume order raised for sample ga-0"):
        d.interrupt(first)


class NeedsArguments:
    def __init__(self, limit):
        self.limit = limit


@pytest.mark.parametrize("rule", ["newest", 3, NeedsArguments, object()])
@pytest.mark.parametrize("name", ["resume_order", "admission"])
def test_what_is_no_rule_is_refused(name, rule):
    with pytest.raises(ConfigError, match=f"partial_rollout.{name}"):
        PartialRolloutConfig(**{name: rule})
