"""Population-based training of two trials: the weaker one takes over the other's checkpoint.

Run: ``python examples/arithmetic/tune_pbt.py``; it needs the extra ``rllib``.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import ray
from ray import tune
from ray.tune.schedulers import PopulationBasedTraining
from tune_asha import REWARD, make_small_config

import ray_apr

ROOM = "room_for_a_run"
"""Resource of which a trial needs one: the cluster has as many as it holds runs. With
``max_concurrent_trials`` instead, Tune would not make the trials that wait for the others."""


def main() -> None:
    """Run the population in turns."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=8, help="of each trial")
    parser.add_argument("--storage", type=Path, default=Path("runs/tune"))
    args = parser.parse_args()
    ray_apr.init("local", num_cpus=4, resources={ROOM: 1}, include_dashboard=False)
    config = make_small_config().resources(custom_resources_for_main_process={ROOM: 1})
    scheduler = PopulationBasedTraining(
        time_attr="training_iteration",
        perturbation_interval=args.iterations // 2,
        quantile_fraction=0.5,
        hyperparam_mutations={"lr": tune.loguniform(1e-5, 3e-4)},
        synch=True,  # all reach the interval before one takes over another's checkpoint
    )
    results = tune.Tuner(
        "APR",
        param_space=config.training(lr=tune.grid_search([1e-4, 1e-6])),
        tune_config=tune.TuneConfig(metric=REWARD, mode="max", scheduler=scheduler),
        run_config=tune.RunConfig(
            name="pbt",
            storage_path=str(args.storage.resolve()),
            stop={"training_iteration": args.iterations},
            checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=True),
            verbose=0,
        ),
    ).fit()
    for result in results:
        if result.error is not None:
            raise result.error
        rate, reward = result.config["lr"], result.metrics["env_runners"]["episode_return_mean"]
        print(f"lr {rate:g}: reward {reward:.3f}")
    exploits = (args.storage / "pbt" / "pbt_global.txt").read_text().splitlines()
    print(f"{len(exploits)} times a trial took over another's checkpoint")
    ray.shutdown()


if __name__ == "__main__":
    main()
