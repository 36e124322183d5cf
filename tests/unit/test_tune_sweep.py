"""What the sweep of examples/tune_sweep.py says of its trials."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pandas as pd
import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "tune_sweep.py"


@pytest.fixture(scope="module")
def sweep() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tune_sweep", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_trials_are_compared_by_the_mean_of_their_last_steps(sweep: ModuleType) -> None:
    """known fault: the last batch alone, of 64 samples, said which trial was the best."""
    rewards = {1e-4: [0.1, 0.5, 0.5, 0.5, 0.5, 0.2], 1e-5: [0.1, 0.2, 0.2, 0.2, 0.2, 0.6]}
    assert sweep.compared(rewards, "/shared/my runs").splitlines() == [
        "lr 0.0001: reward 0.100 → 0.440 (first step → mean of the last 5 steps)",
        "lr 1e-05: reward 0.100 → 0.280 (first step → mean of the last 5 steps)",
        "best mean of the last steps: lr 0.0001",
        "compare: ray-apr report '/shared/my runs/lr-0.0001' '/shared/my runs/lr-1e-05' "
        "--out comparison.html",
    ]


def test_trials_that_ctrl_c_ended_before_their_first_step_are_left_out(sweep: ModuleType) -> None:
    """known fault: the sweep ended in a KeyError."""
    rows = pd.DataFrame({"reward_mean": [0.1, 0.2]})
    told, none = (
        SimpleNamespace(error=None, config={"lr": lr}, metrics=metrics, metrics_dataframe=frame)
        for lr, metrics, frame in ((1e-4, {"reward_mean": 0.2}, rows), (1e-5, {}, pd.DataFrame()))
    )
    assert sweep.rewards_of([told, none]) == {1e-4: [0.1, 0.2]}
    with pytest.raises(SystemExit, match="no trial came to a step"):
        sweep.rewards_of([none])


def test_a_short_trial_says_how_many_steps_it_has(sweep: ModuleType) -> None:
    assert "(first step → mean of the last 2 steps)" in sweep.compared({1e-4: [0.1, 0.2]}, "runs")
