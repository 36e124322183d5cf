"""A process that runs examples one after the other, on one cluster.

Run: ``python -m tests.example_runs``; each line of its input is an example with its arguments, as
``maths --steps 1`` or ``calculator/calculator.yaml --set train.steps=1``. What it prints comes out,
and then a line that begins with `ENDED`.
"""

from __future__ import annotations

import os
import runpy
import shlex
import subprocess
import sys
import time
import traceback
from pathlib import Path

import ray

import ray_apr

EXAMPLES = Path(__file__).parents[1] / "examples"
ENDED = "=== ended"
_LIMIT_S = 600.0
"""Of a run of a YAML file."""


def run(call: str, address: str) -> bool:
    """Run an example on the cluster; whether it came to its good end."""
    name, *arguments = shlex.split(call)
    if name.endswith(".yaml"):
        command = [sys.executable, "-m", "ray_apr", "train", str(EXAMPLES / name), *arguments]
        env = {**os.environ, "RAY_ADDRESS": address}
        ended = subprocess.run(
            command, env=env, stderr=subprocess.STDOUT, timeout=_LIMIT_S, check=False
        )
        return ended.returncode == 0
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
    address = ray.get_runtime_context().gcs_address
    for call in sys.stdin:
        began_at = time.monotonic()
        outcome = "well" if run(call, address) else "badly"
        took_s = time.monotonic() - began_at
        sys.stdout.write(f"{ENDED} {outcome} after {took_s:.0f} s: {call.strip()}\n")
        sys.stdout.flush()
    ray.shutdown()


if __name__ == "__main__":
    main()
