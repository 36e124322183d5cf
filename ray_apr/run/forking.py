"""Which workers of a run are forked from what, where the run starts its own Ray.

A process of Ray's imports for 1 to 2 s of processor time, a train worker for 7, and a server and
its core for 10 each; forked, they share what was imported once, while Ray started.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from ray_apr.compat.forked.servers import Stage, fork_servers
from ray_apr.serve.vllm.arguments import environment_on
from ray_apr.serve.vllm.core_process import WITHOUT_RAY, fork_imports
from ray_apr.serve.vllm.names import ENGINES

ACTORS, TRAIN_WORKERS = "actors", "train-workers"
"""Names of fork servers, by what they fork."""
_OF_ACTORS = (
    "aiohttp",
    "fastapi",
    "fsspec.implementations.local",
    "grpc.aio",
    "grpc_reflection.v1alpha.reflection",
    "jsonschema",
    "lz4.frame",
    "opentelemetry.exporter.prometheus",
    "opentelemetry.sdk.metrics",
    "pandas",
    "psutil",
    "pyarrow.pandas_compat",
    "pyarrow.parquet",
    "requests",
    "uvicorn",
)
"""What Ray, Serve, Ray Data and Ray Train import."""
_OF_TRAIN_WORKERS = ("torch._dynamo", "transformers.modeling_utils", "accelerate.utils")
_COMPILER = ("ray_apr.compat.forked.compiler",)
_NVIDIA = Path("/dev/nvidiactl")


def run_fork_servers(device: str) -> AbstractContextManager[Callable[[], dict[str, str]]]:
    """The fork servers of a run; see `fork_servers`.

    Args:
        device: Of its engines: "cuda", "cpu" or "auto". Where this guesses wrong, engines start
            without being forked.
    """
    if device == "auto":
        device = "cuda" if _NVIDIA.exists() else "cpu"
    return fork_servers(
        [
            Stage(name=ACTORS, modules=_OF_ACTORS, later_modules=["torch"]),
            Stage(
                name=TRAIN_WORKERS,
                modules=["torch", "transformers", "torch.distributed.fsdp"],
                later_modules=[*_OF_TRAIN_WORKERS, *(_COMPILER if device == "cuda" else ())],
            ),
            Stage(
                name=ENGINES,
                modules=WITHOUT_RAY,
                environment=environment_on(device),
                hook=f"{fork_imports.__module__}:{fork_imports.__name__}",
            ),
        ]
    )
