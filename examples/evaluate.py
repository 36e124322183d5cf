"""Evaluation alone: a model, held-out prompts, pass@k; nothing is trained.

    python examples/evaluate.py
    python examples/evaluate.py --model runs/single-file/checkpoint_.../hf

A session's engines are up before its first step, and evaluate the model then. No step is ordered;
the rows and the responses stay in the run folder. Each evaluation is a run of its own: under the
name of another one it would go on with the responses of that model.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import ray
from ray.train import RunConfig, ScalingConfig

import ray_apr
from ray_apr import (
    APRTrainer,
    EvaluationConfig,
    RolloutConfig,
    Sample,
    TrainConfig,
    TrainingSession,
)

ARITHMETIC = Path(__file__).parent / "arithmetic"
LIMIT_S = 300.0


def reward(sample: Sample) -> float:
    """1 for the right sum after the last comma."""
    return float(sample.response_text.rpartition(",")[2] == sample.row["answer"])


def read_rows(file: Path) -> ray.data.Dataset:
    """Rows of Parquet, a file or a folder of them, or of JSON lines as they are."""
    if file.suffix != ".jsonl":
        return ray.data.read_parquet(str(file.resolve()))
    lines = file.read_text(encoding="utf-8").split("\n")
    return ray.data.from_items([json.loads(line) for line in lines if line.strip()])


def first_row(file: Path) -> dict[str, Any]:
    """Wait for the first row of a file; limited by `LIMIT_S`."""
    deadline = time.monotonic() + LIMIT_S
    while not file.exists() or "\n" not in (text := file.read_text()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"no evaluation has ended within {LIMIT_S:g} s")
        time.sleep(0.2)
    return json.loads(text.splitlines()[0])


def main() -> None:
    """Evaluate, and show the figures and a response that failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default=str(ARITHMETIC / "base_model"))
    parser.add_argument(
        "--prompts", type=Path, default=ARITHMETIC / "held_out.parquet", help=".parquet or .jsonl"
    )
    parser.add_argument("--samples", type=int, default=8, help="responses to each prompt")
    parser.add_argument("--name", default=time.strftime("evaluate-%Y%m%d-%H%M%S"))
    parser.add_argument("--storage", default="runs")
    args = parser.parse_args()
    if (Path(args.storage) / args.name).exists():
        parser.error(f"there is a run {args.name} in {args.storage}; choose another --name")
    ray_apr.init(num_cpus=4, ignore_reinit_error=True)
    rows = read_rows(args.prompts)
    trainer = APRTrainer(
        model=args.model,
        prompts=rows,
        evaluation_prompts=rows,
        reward=reward,
        evaluation_config=EvaluationConfig(samples=args.samples, temperature=1.0),
        rollout_config=RolloutConfig(
            group_size=2, max_response_tokens=192, engine={"kwargs": {"max_num_seqs": 64}}
        ),
        train_config=TrainConfig(steps=1, batch_size=2),
        scaling_config=ScalingConfig(num_workers=1, use_gpu=False),
        run_config=RunConfig(name=args.name, storage_path=str(Path(args.storage).resolve())),
    )
    with TrainingSession(trainer) as session:
        row = first_row(session.folder / "evaluations.jsonl")
    print(f"{row['num_samples']} responses: mean reward {row['reward_mean']:.3f}")
    print("  ".join(f"pass@{k} {share:.3f}" for k, share in row["pass_at_k"].items()))
    responses = (session.folder / "evaluation_samples.jsonl").read_text().splitlines()
    failed = next((r for r in map(json.loads, responses) if r["reward"] < 1), None)
    print(f"one that failed: {failed['response'] if failed else 'none'}")


if __name__ == "__main__":
    main()
