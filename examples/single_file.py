"""A run in one file: a model, a reward, prompts, and `fit`. Two CPU cores are enough.

    python examples/single_file.py --steps 20
    python examples/single_file.py --model Qwen/Qwen3-0.6B --gpu     # one GPU for each side

The tiny model of the arithmetic example learns to add: it writes its sums column by column, then a
comma and the result. Change `reward` and `prompts`, and it is your run.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import ray
from ray.train import RunConfig, ScalingConfig

import ray_apr
from ray_apr import (
    APRTrainer,
    PartialRolloutConfig,
    RolloutConfig,
    RunCallback,
    TrackersConfig,
    TrainConfig,
)

TINY = Path(__file__).parent / "arithmetic" / "base_model"


def reward(sample) -> float:
    """1 for the right sum after the last comma."""
    return float(sample.response_text.rpartition(",")[2].strip() == sample.row["answer"])


def prompts(number: int) -> ray.data.Dataset:
    """Sums of two numbers of three digits; a row has what the reward reads."""
    draw = random.Random(0)
    pairs = [(draw.randint(100, 999), draw.randint(100, 999)) for _ in range(number)]
    return ray.data.from_items([{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in pairs])


class Best(RunCallback):
    """The best reward so far, in the driver."""

    reward = 0.0

    def on_step(self, row) -> None:
        self.reward = max(self.reward, row["reward_mean"])


def main() -> None:
    """Train, and say where to read on."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default=str(TINY), help="a folder or a hub id")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--name", default="single-file")
    parser.add_argument("--storage", default="runs")
    parser.add_argument("--gpu", action="store_true")
    args = parser.parse_args()
    ray_apr.init(num_cpus=None if args.gpu else 4)
    engine = {"num_cpus_per_replica": 1, "kwargs": {} if args.gpu else {"max_num_seqs": 64}}
    best = Best()
    trainer = APRTrainer(
        model=args.model,
        prompts=prompts(1000),
        reward=reward,
        rollout_config=RolloutConfig(group_size=8, max_response_tokens=64, engine=engine),
        partial_rollout_config=PartialRolloutConfig.preset("apr", max_staleness=4),
        train_config=TrainConfig(steps=args.steps, batch_size=64, learning_rate=1e-4),
        scaling_config=ScalingConfig(num_workers=1, use_gpu=args.gpu),
        run_config=RunConfig(name=args.name, storage_path=str(Path(args.storage).resolve())),
        callbacks=[best],
        trackers_config=TrackersConfig(tensorboard={}),
    )
    result = trainer.fit(progress=print)
    print(f"best reward {best.reward:.3f}; last checkpoint {result.checkpoint}")
    print(f"read on: python -m ray_apr report {result.path}")


if __name__ == "__main__":
    main()
