"""From the moment a row is made to the moment its reader has it, through Ray Data.

    python benchmarks/hand_over.py --out hand-over.json

A train worker reads its batches as rows of an endless dataset (`ray_apr.data.datasource.rows_of`).
`ours` reads so; `plain` does, too, but Ray Data hands rows on as it does by itself. Each is a
process of its own; they take turns, row by row. A row is made when its reader asks for it, so that
nothing is read ahead.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from host import describe_call, package_versions, ray_environment

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 60.0
_BEFORE = 5
"""Rows of each before any is timed."""


def main() -> None:
    """Time both, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=60)
    parser.add_argument("--row-kb", type=int, default=500)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/hand-over.json")
    args = parser.parse_args()
    import ray

    ray.init(num_cpus=2, runtime_env=ray_environment(), log_to_driver=False)
    gate = ray.remote(num_cpus=0, max_concurrency=8)(Gate).remote()
    reader = ray.remote(num_cpus=0)(Reader)
    readers = {name: reader.remote(name, gate, 1000 * args.row_kb) for name in ("plain", "ours")}
    seconds: dict[str, list[float]] = {name: [] for name in readers}
    for number in range(_BEFORE + args.rows):
        for name, actor in readers.items():
            took = ray.get(actor.next.remote(), timeout=LIMIT_S)
            seconds[name] += [took] if number >= _BEFORE else []
    figures = {
        name: {
            "median_ms": 1000 * statistics.median(took),
            "p90_ms": 1000 * statistics.quantiles(took, n=10)[-1],
        }
        for name, took in seconds.items()
    }
    result = {
        **describe_call(),
        "versions": package_versions(),
        "row_kb": args.row_kb,
        "seconds": seconds,
        "readers": figures,
        "plain_over_ours": figures["plain"]["median_ms"] / figures["ours"]["median_ms"],
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({key: result[key] for key in ("readers", "plain_over_ours")}, indent=1))
    ray.shutdown()


class Gate:
    """Actor: lets a stream make its next row."""

    def __init__(self) -> None:
        self._may = {name: threading.Semaphore(0) for name in ("plain", "ours")}

    def open(self, name: str) -> None:
        """Let it."""
        self._may[name].release()

    def wait(self, name: str) -> None:
        """Return once it may."""
        if not self._may[name].acquire(timeout=LIMIT_S):
            raise TimeoutError(f"nobody reads {name}")


class Reader:
    """Actor: reads a stream of its own."""

    def __init__(self, name: str, gate: Any, row_bytes: int) -> None:
        from ray_apr.data.datasource import rows_of

        if name == "plain":
            os.environ["RAY_DATA_METADATA_PREFETCH_ON_THREAD"] = "1"  # Ray Data's own choice
        self._name, self._gate = name, gate
        self._rows = rows_of(make_stream(name, gate, row_bytes).iterator())

    def next(self) -> float:
        """Read a row; returns the seconds since it was made."""
        import ray

        ray.get(self._gate.open.remote(self._name), timeout=LIMIT_S)
        row = next(self._rows)
        return time.time() - float(row["made_at"])


def make_stream(name: str, gate: Any, row_bytes: int) -> Any:
    """An endless dataset whose rows are made one by one."""
    import pyarrow as pa
    import ray
    from ray.data import DataContext
    from ray.data.block import BlockMetadata
    from ray.data.datasource import Datasource, ReadTask

    def read() -> Iterator[pa.Table]:
        while True:
            ray.get(gate.wait.remote(name), timeout=2 * LIMIT_S)
            yield pa.table({"payload": [bytes(row_bytes)], "made_at": [time.time()]})

    class Stream(Datasource):
        def estimate_inmemory_data_size(self) -> int | None:
            return None

        def get_read_tasks(self, *_: Any, **__: Any) -> list[ReadTask]:
            about = BlockMetadata(num_rows=None, size_bytes=None, exec_stats=None, input_files=None)
            return [ReadTask(read, about)]

    DataContext.get_current().target_max_block_size = 1  # a row is a block, as in a run
    return ray.data.read_datasource(Stream(), override_num_blocks=1, num_cpus=0)


if __name__ == "__main__":
    main()
