"""Tool use: the policy asks a calculator in the middle of its response, and goes on.

    python examples/tool_use.py --steps 12

The tiny model of the arithmetic example adds column by column, ``2+4+0=06;1+9+0=10,106``. Here its
turn ends at each ``=``; the tool says the two digits, and the policy writes on. What the tool says
is read by the policy, and not trained. With the tool nearly all of these sums are right at once.
examples/calculator has the same as a YAML file, with longer sums.
"""

from __future__ import annotations

import argparse
import random
import re
from pathlib import Path

import ray
from ray.train import RunConfig, ScalingConfig

import ray_apr
from ray_apr import APRTrainer, Environment, RewardResult, RolloutConfig, Sample, Step, TrainConfig

TINY = Path(__file__).parent / "arithmetic" / "base_model"


class Calculator(Environment):
    """Answers ``1+9+0=``. A call may come in any process, so that its memory is in the sample."""

    def step(self, sample: Sample) -> Step:
        """Say the sum of the column, or end the response with its reward."""
        calls = sample.environment_state.get("calls", 0)
        asked = re.search(r"(\d)\+(\d)\+(\d)=$", sample.turn_text or "")
        if asked and sample.finish_reason is None:  # else its budget is spent
            digits = f"{sum(map(int, asked.groups())):02d}"
            return Step(text=digits, state={"calls": calls + 1})
        answer = (sample.turn_text or "").rpartition(",")[2]
        right = answer == sample.row["answer"]
        return Step(done=True, reward=RewardResult(reward=float(right), metrics={"calls": calls}))


def prompts(number: int) -> ray.data.Dataset:
    """Sums of two numbers of two digits."""
    draw = random.Random(0)
    pairs = [(draw.randint(10, 99), draw.randint(10, 99)) for _ in range(number)]
    return ray.data.from_items([{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in pairs])


def main() -> None:
    """Train, and show how often the tool was asked."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--storage", default="runs")
    args = parser.parse_args()
    ray_apr.init(num_cpus=4, ignore_reinit_error=True)
    trainer = APRTrainer(
        model=str(TINY),
        prompts=prompts(1000),
        environment=Calculator(),
        rollout_config=RolloutConfig(
            group_size=8,
            max_response_tokens=64,
            max_turns=6,
            sampling={"stop_strings": ("=",)},
            engine={"kwargs": {"max_num_seqs": 64}},
        ),
        train_config=TrainConfig(steps=args.steps, batch_size=64, learning_rate=1e-4),
        scaling_config=ScalingConfig(num_workers=1, use_gpu=False),
        run_config=RunConfig(name="tool-use", storage_path=str(Path(args.storage).resolve())),
    )
    last = trainer.fit(progress=print).metrics
    calls = last["reward/calls_mean"]
    print(f"last step: {last['reward_mean']:.0%} right, {calls:.1f} calls of the tool a response")


if __name__ == "__main__":
    main()
