"""What the tuner tells of a cluster, for every kind of choice."""

from __future__ import annotations

import pytest

from ray_apr.config import PartialRolloutConfig, RolloutConfig, TrainConfig
from ray_apr.config.engine import EngineConfig
from ray_apr.config.sections import check_placement
from ray_apr.tools.simulator.advice import settings, tuning_text, why
from ray_apr.tools.simulator.cluster import BatchConfig
from ray_apr.tools.simulator.tuner import Tuner
from tests.traces import make_cluster, make_trace


@pytest.mark.parametrize("gpus", [2, 4])
@pytest.mark.parametrize("steps", [4, 8])
def test_a_choice_is_told_beside_the_others_that_were_tried(gpus, steps):
    """known fault: the comparison made settings that contradict themselves, and the search ended
    without an answer."""
    tuning = Tuner(make_trace(), make_cluster(gpus=gpus, rollout_gpus=gpus // 2, steps=steps)).run()
    assert f"{tuning.choice.score:.0f}" in tuning_text(tuning, ())


@pytest.mark.parametrize(
    ("gpus", "prompts", "sizes"),
    [(4, 8, "24 or 36"), (4, 2, "12"), (4, 6, None), (3, 8, None)],
)
def test_a_batch_that_cannot_be_cut_for_the_train_workers_is_told(gpus, prompts, sizes):
    """known fault: `scaling.num_workers: 3` was written for batches of 32, which a run refuses."""
    batch = BatchConfig(prompts=prompts, group_size=4)
    cluster = make_cluster(gpus=gpus, rollout_gpus=1, batch=batch, steps=2)
    tuning = Tuner(make_trace(), cluster, max_staleness=0).run("sync")
    told = [line for line in why(tuning) if "cannot be cut" in line]
    assert len(told) == (sizes is not None)
    if sizes is not None:
        assert f"batch of {4 * prompts} cannot be cut for 3 train workers" in told[0]
        assert f"take a train.batch_size of {sizes}, or another" in told[0]
        assert f"# {told[0]}\n" in tuning_text(tuning)


@pytest.mark.parametrize("mode", ["apr", "sync"])
def test_the_settings_of_a_choice_are_those_of_a_run_on_its_cluster(mode):
    """known fault: those of a colocated cluster did not say that it is one, and `overlap_sync` of
    the mode is refused there."""
    cluster = make_cluster(placement="colocated", rollout_gpus=None, steps=2)
    chosen = settings(Tuner(make_trace(), cluster).run(mode).choice)
    partial = PartialRolloutConfig.preset(chosen["mode"], **chosen["partial_rollout"])
    engine = EngineConfig(**chosen["rollout"].pop("engine"))
    rollout = RolloutConfig(engine=engine, **chosen["rollout"])
    assert rollout.is_colocated and chosen["scaling"] == {"num_workers": 4}
    check_placement(rollout, partial, TrainConfig(), 4)
    split = settings(Tuner(make_trace(), make_cluster(steps=2)).run(mode).choice)
    assert (split["rollout"], split["scaling"]) == ({"num_replicas": 2}, {"num_workers": 2})
