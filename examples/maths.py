"""Maths: math-verify says whether an answer equals the reference, however it is written.

    pip install 'ray_apr[rewards]'
    python examples/maths.py --steps 20

The references here are fractions, ``\\frac{212}{2}`` for 106: no comparison of texts would do. The
tiny model of the arithmetic example puts its answer after its last comma. For a model that boxes
its answers, `math_equal("solution", boxed_only=True)` is all of the reward.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import random
from pathlib import Path

import ray
from ray.train import RunConfig, ScalingConfig

import ray_apr
from ray_apr import APRTrainer, RewardResult, RolloutConfig, Sample, TrainConfig
from ray_apr.rewards import math_equal

TINY = Path(__file__).parent / "arithmetic" / "base_model"
IS_EQUAL = math_equal("solution")


def reward(sample: Sample) -> RewardResult:
    """1 if what follows the last comma equals the column "solution", else 0."""
    answer = sample.response_text.rpartition(",")[2]
    return IS_EQUAL(dataclasses.replace(sample, response_text=f"${answer}$"))


def prompts(number: int) -> ray.data.Dataset:
    """Sums of two numbers of two digits; the solution is in LaTeX."""
    draw = random.Random(0)
    pairs = [(draw.randint(10, 99), draw.randint(10, 99)) for _ in range(number)]
    return ray.data.from_items(
        [{"prompt": f"{a}+{b}=", "solution": rf"\frac{{{2 * (a + b)}}}{{2}}"} for a, b in pairs]
    )


def main() -> None:
    """Train, and show the reward and what math-verify said beside it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--storage", default="runs")
    args = parser.parse_args()
    if importlib.util.find_spec("math_verify") is None:
        raise SystemExit("this example needs math-verify: pip install 'ray_apr[rewards]'")
    ray_apr.init(num_cpus=4, ignore_reinit_error=True)
    trainer = APRTrainer(
        model=str(TINY),
        prompts=prompts(1000),
        reward=reward,
        rollout_config=RolloutConfig(
            group_size=8, max_response_tokens=64, engine={"kwargs": {"max_num_seqs": 64}}
        ),
        train_config=TrainConfig(steps=args.steps, batch_size=64, learning_rate=1e-4),
        scaling_config=ScalingConfig(num_workers=1, use_gpu=False),
        run_config=RunConfig(name="maths", storage_path=str(Path(args.storage).resolve())),
    )
    result = trainer.fit(progress=print)
    found = result.metrics["reward/math_answer_found_mean"]
    print(
        f"last step: {result.metrics['reward_mean']:.0%} right, {found:.0%} with an answer at all"
    )


if __name__ == "__main__":
    main()
