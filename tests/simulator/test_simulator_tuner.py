"""What the tuner tells of a cluster, for every kind of choice."""

from __future__ import annotations

import pytest

from ray_apr.tools.simulator.advice import tuning_text
from ray_apr.tools.simulator.tuner import Tuner
from tests.traces import make_cluster, make_trace


@pytest.mark.parametrize("gpus", [2, 4])
@pytest.mark.parametrize("steps", [4, 8])
def test_a_choice_is_told_beside_the_others_that_were_tried(gpus, steps):
    """known fault: the comparison made settings that contradict themselves, and the search ended
    without an answer."""
    tuning = Tuner(make_trace(), make_cluster(gpus=gpus, rollout_gpus=gpus // 2, steps=steps)).run()
    assert f"{tuning.choice.score:.0f}" in tuning_text(tuning, ())
