"""Rejection sampling: the right responses of a run, as data for supervised fine-tuning.

    python examples/single_file.py --steps 20
    python examples/rejection_sampling.py runs/single-file

A run keeps its trained samples as Parquet (`train.save_samples`), which Ray Data reads. Of each
prompt the shortest right response is kept; what no sample got right is left out. The rows have the
columns "prompt" and "completion", as trainers for fine-tuning take them.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pandas as pd
import ray
from ray.data.expressions import col

COLUMNS = ["step", "prompt", "response_text", "reward", "num_generated", "finish_reason"]


def shortest(rows: pd.DataFrame) -> pd.DataFrame:
    """Of one prompt's right responses the shortest one."""
    return rows.nsmallest(1, "num_generated")


def main() -> None:
    """Filter, choose, and write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run", type=Path, help="a run folder")
    parser.add_argument("--least-reward", type=float, default=1.0)
    parser.add_argument("--from-step", type=int, default=0, help="leave out what is before")
    parser.add_argument("--partitions", type=int, default=2, help="more of them for large runs")
    parser.add_argument("--out", type=Path, help="a folder; without it RUN/chosen")
    args = parser.parse_args()
    out = (args.out or args.run / "chosen").resolve()
    if out.exists():
        raise SystemExit(f"{out} exists already; name another folder by --out")
    ray.init(log_to_driver=False, ignore_reinit_error=True)
    samples = ray.data.read_parquet(str(args.run.resolve() / "samples")).select_columns(COLUMNS)
    is_good = (
        (col("reward") >= args.least_reward)
        & (col("step") >= args.from_step)
        & (col("finish_reason") == "stop")  # it ended by itself, and was not cut
    )
    chosen = (
        samples.filter(expr=is_good)
        .groupby("prompt", num_partitions=args.partitions)
        .map_groups(shortest, batch_format="pandas")
        .rename_columns({"response_text": "completion"})
        .select_columns(["prompt", "completion", "reward", "step"])
        .materialize()
    )
    print(f"{samples.count()} samples, {chosen.count()} prompts with a right response")
    chosen.write_parquet(str(out))
    print(f"written: {out}")


if __name__ == "__main__":
    main()
