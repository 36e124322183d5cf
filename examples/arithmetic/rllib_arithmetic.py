"""The arithmetic task as an algorithm of RLlib, until its mean reward passes 0.8.

Run: ``python examples/arithmetic/rllib_arithmetic.py``; it needs the extra ``rllib``. With
``--restore PATH`` it goes on from a checkpoint that it has saved.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pyarrow.parquet as pq
import task

import ray_apr
from ray_apr.data.rows import PromptRows
from ray_apr.rllib import APR, APRConfig

HERE = Path(__file__).resolve().parent


def make_config() -> APRConfig:
    """Settings of quickstart.yaml."""
    return (
        APRConfig()
        .training(
            model=str(HERE / "base_model"),
            prompts=PromptRows(pq.read_table(HERE / "prompts.parquet")),
            reward=task.reward,
            lr=1e-4,
            train_batch_size=128,
            steps=128,
            steps_per_iteration=4,
            train={"micro_batch_tokens": 2048, "num_threads": 1},
        )
        .rollouts(
            rollout={
                "group_size": 8,
                "max_response_tokens": 192,
                "engine": {"device": "cpu", "kwargs": {"max_num_seqs": 64}},
            },
            partial_rollout={"max_live_batches": 3},
        )
    )


def main() -> None:
    """Train, show each iteration, and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--restore", type=Path, help="a checkpoint to go on from")
    parser.add_argument("--save", type=Path, default=Path("runs/rllib-checkpoint"))
    parser.add_argument("--reward", type=float, default=0.8, help="mean reward to stop at")
    parser.add_argument("--iterations", type=int, default=30, help="most iterations of this call")
    args = parser.parse_args()
    ray_apr.init("local", num_cpus=4, include_dashboard=False, ignore_reinit_error=True)
    algo = make_config().build_algo() if args.restore is None else APR.from_checkpoint(args.restore)
    try:
        for _ in range(args.iterations):
            result = algo.train()
            reward = result["env_runners"]["episode_return_mean"]
            steps = result["num_training_steps_lifetime"]
            print(
                f"iteration {result['training_iteration']:3}, {steps:3} steps: reward {reward:.3f}"
            )
            if reward > args.reward or result["done"]:
                break
        print(f"saved to {algo.save_to_path(args.save.resolve())}")
    finally:
        algo.stop()


if __name__ == "__main__":
    main()
