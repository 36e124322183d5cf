"""What a run leaves in memory, without the collector of garbage (scheduling/{queues,live}.py)."""

from __future__ import annotations

import gc

import pytest

from ray_apr.config import PartialRolloutConfig
from ray_apr.scheduling.live import LiveGroup
from ray_apr.scheduling.queues import _FEW
from tests.schedules import Driven

STEPS = 200


def num_groups() -> int:
    """Groups in memory, live or not."""
    return sum(type(thing) is LiveGroup for thing in gc.get_objects())


@pytest.mark.parametrize("on_stale", ["mask", "evict"])
@pytest.mark.parametrize("ends", ["handed over", "failed"])
def test_groups_that_left_are_freed_at_once(on_stale, ends):
    config = PartialRolloutConfig(max_staleness=1, on_stale=on_stale)
    driven = Driven(config, batch_size=4, group_size=2, max_inflight=100)
    gc.collect()
    gc.disable()
    before = num_groups()
    try:
        for step in range(STEPS):
            driven.admit_some(f"{step}a", f"{step}b")
            samples = driven.start_all()
            for name in samples:
                driven.interrupt(name, step)
            assert driven.start_all() == samples
            if ends == "handed over":
                assert len(driven.complete(samples, step)) == 2
                driven.on_buffer_counts(num_buffered=0)
            else:
                for name in samples[::2]:
                    driven.fail(driven.sample(name))
            driven.tick(lambda: None)
            driven.on_version(step + 1)
        # the queue by age may hold as many of the last ones as are never too many
        assert num_groups() - before <= _FEW
    finally:
        gc.enable()
    assert not driven.live.groups


def test_a_group_that_left_tells_its_samples_as_they_were():
    driven = Driven(PartialRolloutConfig(), batch_size=4, group_size=2, max_inflight=100)
    driven.admit_some("a")
    (group,) = driven.live.groups
    first, second = driven.start_all()
    driven.interrupt(first, tokens=3)
    driven.fail(group.members[0])
    assert [sample.num_generated for sample in group.samples] == [3, 0]
    assert not group.members
    assert [live.sample_id for live in driven.tick(lambda: None).abort] == [second]
