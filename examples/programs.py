"""Programs: responses are run in a sandbox, against tests of the prompt's row.

    python examples/programs.py --steps 20

A model that writes programs needs nothing but `code_tests("tests")`, which takes the last fenced
block of a response. The tiny model of the arithmetic example knows 14 characters, so that its
program is made by `program`: it prints what follows the last comma. What a sandbox holds back on
your machine is told by ``python -m ray_apr doctor``, and by docs/rewards.md.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import ray
from ray.train import RunConfig, ScalingConfig

import ray_apr
from ray_apr import APRTrainer, RolloutConfig, TrainConfig
from ray_apr.rewards import code_tests

TINY = Path(__file__).parent / "arithmetic" / "base_model"


def program(response: str) -> str:
    """The program of a response. It is the policy's text: it may be anything at all."""
    return f"print({response.rpartition(',')[2]})"


def prompts(number: int) -> ray.data.Dataset:
    """Sums; a test is what a program reads and what it has to print."""
    draw = random.Random(0)
    pairs = [(draw.randint(1, 99), draw.randint(1, 99)) for _ in range(number)]
    return ray.data.from_items(
        [
            {"prompt": f"{a}+{b}=", "tests": [{"input": "", "output": f"{a + b}\n"}]}
            for a, b in pairs
        ]
    )


def main() -> None:
    """Train, and show what the sandbox said."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--storage", default="runs")
    args = parser.parse_args()
    ray_apr.init(num_cpus=4, ignore_reinit_error=True)
    trainer = APRTrainer(
        model=str(TINY),
        prompts=prompts(1000),
        reward=code_tests("tests", extract=program, time_limit_s=5, memory_mb=512),
        rollout_config=RolloutConfig(
            group_size=4,
            max_response_tokens=64,
            engine={"kwargs": {"max_num_seqs": 64}},
            reward={"concurrency": 2},  # near the number of cores: programs take processor time
        ),
        train_config=TrainConfig(steps=args.steps, batch_size=32, learning_rate=1e-4),
        scaling_config=ScalingConfig(num_workers=1, use_gpu=False),
        run_config=RunConfig(name="programs", storage_path=str(Path(args.storage).resolve())),
    )
    last = trainer.fit(progress=print).metrics
    has_namespaces = last["reward/code_namespaces_min"] == 1
    print(f"last step: {last['reward_mean']:.0%} of the programs passed their test")
    print(f"the sandbox {'has' if has_namespaces else 'is without'} namespaces here")


if __name__ == "__main__":
    main()
