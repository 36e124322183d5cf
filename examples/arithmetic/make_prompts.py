"""Write the prompts of the arithmetic example, and held-out ones, to Parquet files.

Run: ``python examples/arithmetic/make_prompts.py``
"""

from __future__ import annotations

import argparse
import logging
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import task

logger = logging.getLogger(__name__)

HERE = Path(__file__).resolve().parent


def make_rows(num_rows: int, seed: int) -> list[dict[str, str | int]]:
    """Draw `num_rows` prompts, each with its `answer` and `num_digits` (digits per operand)."""
    rng = random.Random(seed)
    rows = []
    for _ in range(num_rows):
        num_digits = task.sample_num_digits(rng)
        left, right = task.sample_operands(rng, num_digits)
        prompt, answer = task.prompt_text(left, right), str(left + right)
        rows.append({"prompt": prompt, "answer": answer, "num_digits": num_digits})
    return rows


def main() -> None:
    """Parse the arguments and write the files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=HERE / "prompts.parquet")
    parser.add_argument("--num-rows", type=int, default=4096, help="number of prompts")
    parser.add_argument("--held-out", type=Path, default=HERE / "held_out.parquet")
    parser.add_argument("--num-held-out", type=int, default=64, help="number of held-out prompts")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draw")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    rows = make_rows(args.num_rows, args.seed)
    known = {row["prompt"] for row in rows}
    others = make_rows(4 * args.num_held_out, args.seed + 1)
    held_out = [row for row in others if row["prompt"] not in known][: args.num_held_out]
    for path, chosen in ((args.output, rows), (args.held_out, held_out)):
        pq.write_table(pa.Table.from_pylist(chosen), path, compression="zstd")
        logger.info("%s: %d prompts, %d bytes", path.name, len(chosen), path.stat().st_size)


if __name__ == "__main__":
    main()
