"""A process that runs examples one after the other, on one cluster.

Run: ``python -m tests.example_runs "NAME ARGUMENTS" ...``, e.g. ``"maths --steps 2"``. Each prints
what it prints; its seconds are said after it.
"""

from __future__ import annotations

import runpy
import shlex
import sys
import time
from pathlib import Path

import ray

EXAMPLES = Path(__file__).parents[1] / "examples"


def main() -> None:
    ray.init(address="local", num_cpus=6, namespace="examples", log_to_driver=False)
    for call in sys.argv[1:]:
        name, *arguments = shlex.split(call)
        file, began_at = EXAMPLES / f"{name}.py", time.monotonic()
        sys.argv = [str(file), *arguments]
        runpy.run_path(str(file), run_name="__main__")
        sys.stdout.write(f"{name} took {time.monotonic() - began_at:.0f} s\n")
        sys.stdout.flush()
    ray.shutdown()


if __name__ == "__main__":
    main()
