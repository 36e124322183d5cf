"""A sweep of two learning rates by Ray Tune, one run after the other.

    python examples/tune_sweep.py --steps 20

Each trial is a run of its own, with a folder of its own. docs/tune.md says what a trial reserves,
and why `max_concurrent_trials` has to say how many runs fit into the cluster.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

import ray
from ray import tune
from ray.train import RunConfig, ScalingConfig
from ray.tune.integration.ray_train import TuneReportCallback

from ray_apr import APRTrainer, RolloutConfig, Sample, TrainConfig

TINY = Path(__file__).parent / "arithmetic" / "base_model"


def reward(sample: Sample) -> float:
    """1 for the right sum after the last comma."""
    return float(sample.response_text.rpartition(",")[2] == sample.row["answer"])


def prompts(number: int) -> ray.data.Dataset:
    """Sums of two numbers of two digits."""
    draw = random.Random(0)
    pairs = [(draw.randint(10, 99), draw.randint(10, 99)) for _ in range(number)]
    return ray.data.from_items([{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in pairs])


def trial(config: dict[str, Any]) -> None:
    """One run; Tune hears of each of its steps."""
    trainer = APRTrainer(
        model=config["model"],
        prompts=prompts(1000),
        reward=reward,
        rollout_config=RolloutConfig(
            group_size=8, max_response_tokens=64, engine={"kwargs": {"max_num_seqs": 64}}
        ),
        train_config=TrainConfig(
            steps=config["steps"], batch_size=64, learning_rate=config["lr"], report_every=1
        ),
        scaling_config=ScalingConfig(num_workers=1, use_gpu=False),
        run_config=RunConfig(
            name=f"lr-{config['lr']:g}",  # a name belongs to one run
            storage_path=config["storage"],
            callbacks=[TuneReportCallback()],
        ),
    )
    trainer.fit()


def main() -> None:
    """Run the trials, and compare them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--storage", default="runs")
    args = parser.parse_args()
    storage = str(Path(args.storage).resolve())
    ray.init(num_cpus=4, log_to_driver=False, ignore_reinit_error=True)
    results = tune.Tuner(
        trial,
        param_space={
            "lr": tune.grid_search([1e-4, 1e-5]),
            "model": str(TINY),
            "steps": args.steps,
            "storage": storage,
        },
        tune_config=tune.TuneConfig(metric="reward_mean", mode="max", max_concurrent_trials=1),
        run_config=tune.RunConfig(name="sweep", storage_path=storage, verbose=0),
    ).fit()
    for result in results:
        if result.error is not None:
            raise result.error
        rewards = result.metrics_dataframe["reward_mean"]
        print(f"lr {result.config['lr']:g}: reward {rewards.iloc[0]:.3f} → {rewards.iloc[-1]:.3f}")
    print(f"best: lr {results.get_best_result().config['lr']:g}")


if __name__ == "__main__":
    main()
