"""What every result says of itself: which command made it, when, and on which machine."""

from __future__ import annotations

import os
import platform
import sys
import time
from pathlib import Path
from typing import Any


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
