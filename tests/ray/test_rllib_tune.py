"""Ray Tune's trials of "APR", over sessions that train nothing."""

from __future__ import annotations

import pytest
import ray
from ray import tune
from ray.tune.schedulers import PopulationBasedTraining

from tests.fakes import FakeSession
from tests.rllib_configs import FakeAPR, config
from tests.tiny_model import make_tiny_model

pytestmark = [pytest.mark.ray, pytest.mark.slow]

REWARD = "env_runners/episode_return_mean"


@pytest.fixture
def cluster():
    ray.init(
        address="local", num_cpus=4, resources={"room": 1}, include_dashboard=False,
        log_to_driver=False,
    )  # fmt: skip
    yield
    ray.shutdown()


@pytest.mark.long
def test_a_population_takes_turns_and_exploits(cluster, tmp_path):
    """The trial of the lower rate takes over the other's checkpoint, with a rate of its own."""
    model = make_tiny_model(tmp_path / "model")
    given = config(model, steps=100, steps_per_iteration=2, train_batch_size=4)
    given.training(lr=tune.grid_search([2e-4, 1e-6]))
    given.resources(custom_resources_for_main_process={"room": 1})
    scheduler = PopulationBasedTraining(
        time_attr="training_iteration",
        perturbation_interval=2,
        quantile_fraction=0.5,
        resample_probability=0.0,
        hyperparam_mutations={"lr": tune.loguniform(1e-6, 1e-3)},
        synch=True,
    )
    results = tune.Tuner(
        FakeAPR,
        param_space=given,
        tune_config=tune.TuneConfig(metric=REWARD, mode="max", scheduler=scheduler),
        run_config=tune.RunConfig(
            name="pbt",
            storage_path=str(tmp_path / "results"),
            stop={"training_iteration": 4},
            checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=True),
            verbose=0,
        ),
    ).fit()
    assert not results.errors
    rates = {result.config["lr"] for result in results}
    assert 2e-4 in rates
    assert max(rates) == pytest.approx(2.4e-4) or min(rates) == pytest.approx(1.6e-4)
    for result in results:
        learner = result.metrics["learners"]["default_policy"]
        assert learner["default_optimizer_learning_rate"] == result.config["lr"]
        assert (result.metrics["training_iteration"], learner["weights_seq_no"]) == (4, 8)
    best = FakeAPR.from_checkpoint(results.get_best_result().checkpoint)
    assert best.train()["training_iteration"] == 5
    best.stop()
    assert FakeSession.living == []
