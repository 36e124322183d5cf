"""A process that runs examples one after the other, on one cluster.

Run: ``python -m tests.example_runs``; each line of its input is an example with its arguments, as
``maths --steps 1``. What it prints comes out, and then a line that begins with `ENDED`.
"""

from __future__ import annotations

import runpy
import shlex
import sys
import time
import traceback
from pathlib import Path

import ray

import ray_apr

EXAMPLES = Path(__file__).parents[1] / "examples"
ENDED = "=== ended"


def run(call: str) -> bool:
    """Run an example on the cluster; whether it came to its good end."""
    name, *arguments = shlex.split(call)
    file = EXAMPLES / f"{name}.py"
    sys.argv, sys.path[0] = [str(file), *arguments], str(file.parent)  # as `python FILE` has them
    try:
        runpy.run_path(str(file), run_name="__main__")
    except Exception:  # noqa: BLE001  (printed, and the next example runs all the same)
        traceback.print_exc(file=sys.stdout)
        return False
    return True


def main() -> None:
    """Run what the input says."""
    ray_apr.init("local", num_cpus=6, namespace="examples", include_dashboard=False)
    for call in sys.stdin:
        began_at = time.monotonic()
        outcome = "well" if run(call) else "badly"
        took_s = time.monotonic() - began_at
        sys.stdout.write(f"{ENDED} {outcome} after {took_s:.0f} s: {call.strip()}\n")
        sys.stdout.flush()
    ray.shutdown()


if __name__ == "__main__":
    main()
