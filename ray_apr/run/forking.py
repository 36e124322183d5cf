"""Which workers of a run are forked from what, where Ray is started for it.

A process of Ray's imports for 1 to 2 s of processor time, a train worker for 7, and a server and
its core for 10 each; forked, they share what was imported once, while Ray started.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

from ray_apr.compat.forked.servers import Stage, fork_servers
from ray_apr.compat.ray import (
    NONE_AHEAD,
    STATE_TRACKING,
    cluster_of_this_machine,
    init_beside_dashboard,
    reach,
)
from ray_apr.config.engine import Device
from ray_apr.core.checks import require
from ray_apr.core.exceptions import ConfigError, one_line
from ray_apr.serve.vllm.arguments import environment_on
from ray_apr.serve.vllm.core_process import WITHOUT_RAY, fork_imports
from ray_apr.serve.vllm.names import ENGINES

logger = logging.getLogger(__name__)

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


def init(address: str | None = None, *, device: Device = "auto", **options: Any) -> str | None:
    """`ray.init` for runs in Python: a Ray that starts here forks their workers.

    Where it joins no cluster, Ray starts as `ray-apr train` has it: processes begin beside it that
    import once what a run's workers need, and all workers of this driver, those of its own tasks,
    too, are forked from them. They end with this process. A worker that wants other variables than
    this process has now is started as ever; so is each one where a `runtime_env` or `job_config` is
    given.

    Args:
        address: Of the cluster to join. Without one, as `ray.init`: that of RAY_ADDRESS, which is
            set inside of a Ray job, or of `ray start` on this machine; where there is none, and
            with "local", Ray is started.
        device: Of engines, as `rollout.engine.device`.
        options: Of `ray.init`. By default the namespace is "ray_apr", and what workers print stays
            in the logs of Ray's session (`log_to_driver=False`).

    Waits for: Ray and its dashboard. Unblocked by: their start, or Ray's own limits.

    Returns:
        The dashboard's address as ``host:port``; None where there is none.

    Raises:
        ConfigError: If the cluster to join does not answer, or has CPUs and GPUs of its own.
        Exception: What `ray.init` raises, but for what its dashboard fails of, which is logged.
    """
    import ray

    address = address or os.environ.get("RAY_ADDRESS") or cluster_of_this_machine() or "local"
    given: dict[str, Any] = {"namespace": "ray_apr", "log_to_driver": False} | options
    is_plain = not (given.get("runtime_env") or given.get("job_config"))
    if address == "local" and is_plain and not ray.is_initialized():
        os.environ.setdefault(STATE_TRACKING, "1")
        given["runtime_env"] = _servers_of_this_process(device)()
        given["_system_config"] = NONE_AHEAD | given.get("_system_config", {})
    if address != "local" and not ray.is_initialized():
        _check_joins(address, given)
    dashboard = init_beside_dashboard(address=address, **given)
    if error := dashboard.exception():
        logger.warning("this Ray has no dashboard: %s", one_line(error))
        return None
    return dashboard.result()


def _check_joins(address: str, options: Mapping[str, Any]) -> None:
    """Check that a cluster answers, and is asked for nothing that only one that starts here has."""
    for name in ("num_cpus", "num_gpus"):
        remedy = f'the cluster at {address} has its own; leave it out, or give address="local"'
        require(options.get(name) is None, name, options.get(name), remedy)
    try:
        reach(address)
    except ConnectionError as error:
        remedy = f'no Ray cluster can be joined there: {error}; or give address="local"'
        raise ConfigError("address", address, remedy) from error


@functools.cache
def _servers_of_this_process(device: str) -> Callable[[], dict[str, str]]:
    servers = ExitStack()
    atexit.register(servers.close)
    return servers.enter_context(run_fork_servers(device))
