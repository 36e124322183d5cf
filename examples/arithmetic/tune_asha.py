"""Four learning rates in Ray Tune; ASHA stops those that lag behind.

Run: ``python examples/arithmetic/tune_asha.py``; it needs the extra ``rllib``.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import ray
from ray import tune
from ray.tune.schedulers import ASHAScheduler
from rllib_arithmetic import make_config

import ray_apr
from ray_apr.rllib import APR, APRConfig

REWARD = "env_runners/episode_return_mean"


def make_small_config() -> APRConfig:
    """Smaller steps, for trials that are soon told apart."""
    return make_config().training(train_batch_size=64, steps_per_iteration=2)


def main() -> None:
    """Run the trials, one at a time, and go on with the best one's checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=9, help="of the best trials")
    parser.add_argument("--storage", type=Path, default=Path("runs/tune"))
    args = parser.parse_args()
    ray_apr.init("local", num_cpus=4, include_dashboard=False)
    results = tune.Tuner(
        "APR",
        param_space=make_small_config().training(lr=tune.grid_search([1e-4, 1e-5, 1e-6, 3e-4])),
        tune_config=tune.TuneConfig(
            metric=REWARD,
            mode="max",
            scheduler=ASHAScheduler(
                grace_period=args.iterations // 3, max_t=args.iterations, reduction_factor=2
            ),
            max_concurrent_trials=1,  # engines and train workers are outside of a trial's resources
        ),
        run_config=tune.RunConfig(
            name="asha",
            storage_path=str(args.storage.resolve()),
            checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=True),
            verbose=0,
        ),
    ).fit()
    for result in results:
        if result.error is not None:
            raise result.error
        rate, iterations = result.config["lr"], result.metrics["training_iteration"]
        reward = result.metrics["env_runners"]["episode_return_mean"]
        print(f"lr {rate:g}: {iterations} iterations, reward {reward:.3f}")
    best = results.get_best_result()
    algo = APR.from_checkpoint(best.checkpoint)
    try:
        result = algo.train()
    finally:
        algo.stop()
    reward = result["env_runners"]["episode_return_mean"]
    print(f"lr {best.config['lr']:g} goes on: reward {reward:.3f}")
    ray.shutdown()


if __name__ == "__main__":
    main()
