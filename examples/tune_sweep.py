"""A sweep of learning rates by Ray Tune, one run after the other.

    python examples/tune_sweep.py --steps 20

Each trial is a run of its own, with a folder of its own. docs/tune.md says what a trial reserves,
and why `max_concurrent_trials` has to say how many runs fit into the cluster.
"""

from __future__ import annotations

import argparse
import random
import shlex
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray import tune
from ray.train import RunConfig, ScalingConfig
from ray.tune.integration.ray_train import TuneReportCallback

import ray_apr
from ray_apr import APRTrainer, RolloutConfig, Sample, TrainConfig

TINY = Path(__file__).parent / "arithmetic" / "base_model"
NUM_LAST = 5
"""Steps whose mean reward is compared: that of one batch is mostly chance."""


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
            name=name_of(config["lr"]),  # a name belongs to one run
            storage_path=config["storage"],
            callbacks=[TuneReportCallback()],
        ),
    )
    trainer.fit()


def name_of(lr: float) -> str:
    """Name of a trial's run."""
    return f"lr-{lr:g}"


def rewards_of(results: Iterable[tune.Result]) -> dict[float, list[float]]:
    """Learning rate -> mean reward of each step, of trials that came to any."""
    rewards = {}
    for result in results:
        if result.error is not None:
            raise result.error
        if "reward_mean" in (result.metrics or {}):  # else Ctrl-C came before its first step
            rewards[result.config["lr"]] = result.metrics_dataframe["reward_mean"].tolist()
    if not rewards:
        raise SystemExit("no trial came to a step, so that nothing is compared")
    return rewards


def compared(rewards: Mapping[float, Sequence[float]], storage: str) -> str:
    """What the trials came to, and the command that compares their runs.

    Args:
        rewards: Learning rate -> mean reward of each step.
        storage: Where the run folders are.
    """
    last = {lr: statistics.fmean(of_steps[-NUM_LAST:]) for lr, of_steps in rewards.items()}
    lines = [
        f"lr {lr:g}: reward {rewards[lr][0]:.3f} → {mean:.3f} "
        f"(first step → mean of the last {min(NUM_LAST, len(rewards[lr]))} steps)"
        for lr, mean in last.items()
    ]
    folders = (shlex.quote(str(Path(storage) / name_of(lr))) for lr in rewards)
    lines.append(f"best mean of the last steps: lr {max(last, key=lambda lr: last[lr]):g}")
    lines.append(f"compare: ray-apr report {' '.join(folders)} --out comparison.html")
    return "\n".join(lines)


def main() -> None:
    """Run the trials, and compare them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-4, 1e-5])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--storage", default="runs")
    args = parser.parse_args()
    storage = str(Path(args.storage).resolve())
    ray_apr.init(num_cpus=4, ignore_reinit_error=True)
    results = tune.Tuner(
        trial,
        param_space={
            "lr": tune.grid_search(args.lr),
            "model": str(TINY),
            "steps": args.steps,
            "storage": storage,
        },
        tune_config=tune.TuneConfig(max_concurrent_trials=1),
        run_config=tune.RunConfig(name="sweep", storage_path=storage, verbose=0),
    ).fit()
    print(compared(rewards_of(results), storage))


if __name__ == "__main__":
    main()
