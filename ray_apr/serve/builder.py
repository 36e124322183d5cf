"""Makes the Serve application of the rollout servers, starts it, changes it, and takes it away.

Invariants:
    * Replicas that stay go on, untouched, when engines come or go: each engine is a deployment of
      its own, whose version is that of the driver's job and of what the engine is built from.
    * An application that cannot be changed is as it was.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import ray
from ray import serve
from ray.exceptions import ActorUnavailableError, RayError, RayTaskError
from ray.serve.config import HTTPOptions
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview, LoggingConfig

from ray_apr.compat.forked.servers import runtime_env as forked_by
from ray_apr.compat.ray import http_of_serve, kept_deployment, living_actors
from ray_apr.config import RolloutConfig
from ray_apr.config.common import dtype_on
from ray_apr.config.engine import Device
from ray_apr.config.http import HttpConfig
from ray_apr.core.exceptions import ConfigError, ResourceError
from ray_apr.serve.handle import engine_names
from ray_apr.serve.ingress import build_ingress
from ray_apr.serve.lease import is_leased_to_others
from ray_apr.serve.server import RolloutServer
from ray_apr.serve.spec import EngineSpec
from ray_apr.serve.vllm.arguments import environment, gpu_share, has_worker_actors
from ray_apr.serve.vllm.names import ENGINES

logger = logging.getLogger(__name__)

SEES_ALL_GPUS = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
"""Ray's variable, by which its actors see also the GPUs that they have not."""
_POLL_S = 0.5
_LOOK_S = 0.1
"""Between looks whether replicas have ended: Serve's own client looks once a second."""
_DELETION_S = 60.0
_ALONE_S = 60.0
_SERVE = threading.Lock()
"""Held while Serve's settings are made or read: Ray pickles a class of its own for each of them, in
a way that fails where two threads do so."""


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Use Serve in one thread at a time; in two rather than wait for long."""
    is_alone = _SERVE.acquire(timeout=_ALONE_S)
    try:
        yield
    finally:
        if is_alone:
            _SERVE.release()


def build_rollout_app(
    spec: EngineSpec, config: RolloutConfig, *, num_behind_http: int
) -> serve.Application:
    """Bind a deployment for each engine, behind an HTTP ingress if one is asked for.

    Args:
        spec: What each engine is built from; its device is known.
        config: Number of replicas, HTTP.
        num_behind_http: Engines that the ingress is told of.
    """
    context = ray.get_runtime_context()
    namespace = context.namespace
    version = f"{context.get_job_id()}-{zlib.crc32(repr(spec).encode()):08x}"
    env = environment(spec, namespace) if spec.factory == "vllm" else {}
    runtime_env: dict[str, Any] = {"env_vars": env}
    if spec.factory == "vllm" and not has_worker_actors(spec):
        runtime_env |= forked_by(ENGINES)
    if spec.device == "cuda" and not has_worker_actors(spec):
        env[SEES_ALL_GPUS] = "0"  # else all engines of a host would take its first GPU
    deployment = serve.deployment(
        RolloutServer,
        num_replicas=1,
        max_ongoing_requests=100_000,
        max_constructor_retry_count=2,
        graceful_shutdown_timeout_s=2.0,
        graceful_shutdown_wait_loop_s=_LOOK_S,
        health_check_period_s=2.0,
        health_check_timeout_s=60.0,
        logging_config=LoggingConfig(enable_access_log=False),  # else a line a call, never removed
        **_placement(spec, config.engine.num_cpus_per_replica, runtime_env),
    )
    deployment = kept_deployment(deployment, version)
    names = engine_names(config.num_replicas)
    others = [deployment.options(name=name).bind(spec) for name in names[1:]]
    servers = deployment.options(name=names[0]).bind(spec, *others)
    if config.http.port is None:
        return servers
    behind = dataclasses.replace(config, num_replicas=num_behind_http)
    ingress = build_ingress(behind, spec.max_model_len)
    return kept_deployment(ingress, version).bind(servers)  # so that Serve starts them


def _placement(spec: EngineSpec, num_cpus: float, runtime_env: dict[str, Any]) -> dict[str, Any]:
    """What a replica reserves: a GPU or its share of one; of several, its workers have each theirs,
    in bundles of their own."""
    options = {"num_cpus": num_cpus, "runtime_env": runtime_env}
    if not has_worker_actors(spec):
        num_gpus = gpu_share(spec) if spec.device == "cuda" else 0
        return {"ray_actor_options": options | {"num_gpus": num_gpus}}
    worker = {"CPU": 1, "GPU": gpu_share(spec)}
    workers = [worker for _ in range(spec.tensor_parallel_size)]
    bundles = [{"CPU": num_cpus}, *workers] if num_cpus else workers  # Ray takes no empty one
    return {
        "ray_actor_options": options,
        "placement_group_bundles": bundles,
        "placement_group_strategy": "PACK",
    }


def start_rollout_servers(
    app_name: str,
    spec: EngineSpec,
    config: RolloutConfig,
    *,
    cancelled: threading.Event | None = None,
) -> None:
    """Start the servers and wait until all of them are ready.

    Waits for: Serve, then the replicas. Unblocked by: their answers, `cancelled`, or
    `rollout.engine.start_timeout_s`.

    Args:
        app_name: Name of the Serve application.
        spec: What each engine is built from.
        config: Number of replicas, HTTP, time limit.
        cancelled: Another thread sets it to end the wait.

    Raises:
        ConfigError: For what ends an engine on CPU, where it is one; or for a port that Serve does
            not open, as it runs already.
        ResourceError: If they are not ready within ``start_timeout_s``, one cannot start, or the
            wait was cancelled; the application is then taken away.
    """
    spec = _on_device(spec, config)
    if config.http.port is None:
        serve.start(http_options=HTTPOptions(location="NoServer"))
    else:
        serve.start(http_options=HTTPOptions(host=config.http.host, port=config.http.port))
        _check_http(config.http)
    _deploy(app_name, spec, config, config.num_replicas)
    try:
        _wait_until_running(app_name, config.engine.start_timeout_s, cancelled or threading.Event())
    except ResourceError:
        stop_rollout_servers(app_name)
        raise


def _check_http(http: HttpConfig) -> None:
    """Check that Serve listens where it is to: what runs already keeps the address that it has."""
    found = http_of_serve()
    if found != (http.host, http.port):
        has = "without HTTP" if found is None else f"with HTTP at {found[0]}:{found[1]}"
        raise ConfigError(
            "rollout.http.port",
            http.port,
            f"cannot be opened at {http.host}: Serve runs on this cluster {has}, for another run "
            "or application, and has one address; leave the port out, end the other, or use "
            "another cluster",
        )


def change_rollout_servers(
    app_name: str,
    spec: EngineSpec,
    config: RolloutConfig,
    *,
    num_behind_http: int,
    timeout_s: float,
    cancelled: threading.Event,
) -> None:
    """Have servers that run be as many as `config` says; those that stay go on, untouched.

    Args:
        app_name: Name of the Serve application.
        spec: What each engine is built from, as at the start.
        config: Number of replicas now; all else as at the start.
        num_behind_http: Engines that the ingress is told of, where there is one.
        timeout_s: Limit for all of them to be ready.
        cancelled: Another thread sets it to end the wait.

    Raises:
        ResourceError: If they are not ready in time, one cannot start, or the wait was cancelled;
            the application is then to be changed back.
    """
    _deploy(app_name, _on_device(spec, config), config, num_behind_http)
    _wait_until_running(app_name, timeout_s, cancelled)


def _on_device(spec: EngineSpec, config: RolloutConfig) -> EngineSpec:
    """The spec, of the device that the cluster has."""
    if spec.device == "auto":
        has_gpus = ray.cluster_resources().get("GPU", 0) >= 1
        device: Device = "cuda" if has_gpus else "cpu"
        dtype = dtype_on(device, config.engine.dtype)
        spec = dataclasses.replace(spec, device=device, dtype=dtype)
    if spec.device == "cpu":
        config.check_on_cpu()
    return spec


def _deploy(app_name: str, spec: EngineSpec, config: RolloutConfig, num_behind_http: int) -> None:
    """Have Serve run the application.

    Waits for: Serve, and who else uses it here. Unblocked by: its answer.
    """
    route = None if config.http.port is None else "/"
    with _alone():
        app = build_rollout_app(spec, config, num_behind_http=num_behind_http)
        serve.run_many(
            [serve.RunTarget(target=app, name=app_name, route_prefix=route)],
            wait_for_applications_running=False,
        )


def _wait_until_running(app_name: str, timeout_s: float, cancelled: threading.Event) -> None:
    """Wait for all replicas; Serve itself would retry a failing constructor without end.

    Waits for: the replicas. Unblocked by: these, the failure of one, `cancelled`, or `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        app = (_applications() or {}).get(app_name)
        if app is not None and app.status == ApplicationStatus.RUNNING:
            return
        deployments = [] if app is None else app.deployments.values()
        said = [deployment.message for deployment in deployments if deployment.message]
        message = said[0] if said else app.message if app else ""
        if app is not None and app.status == ApplicationStatus.DEPLOY_FAILED:
            raise ResourceError(f"the rollout servers cannot start: {message}")
        if time.monotonic() > deadline:
            raise ResourceError(
                f"the rollout servers are not ready after {timeout_s:g} s "
                f"(rollout.engine.start_timeout_s): {message or 'Serve gives no reason'}; "
                "does the cluster hold what they ask for?"
            )
        if cancelled.wait(_POLL_S):
            raise ResourceError("the start of the rollout servers was cancelled")


def wait_until_placed(
    app_name: str, num_engines: int, timeout_s: float, starter: threading.Thread
) -> None:
    """Wait until each replica has a process, and with it its share of a GPU: train workers that
    asked for the rest before could get two shares of one GPU.

    Waits for: those processes. Unblocked by: these, the end of `starter`, or `timeout_s`.

    Args:
        app_name: Name of the Serve application.
        num_engines: Its replicas.
        timeout_s: Longest wait.
        starter: Starts the application.

    Raises:
        ResourceError: If they have none within `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    while starter.is_alive():
        engines = engines_of(app_name, living_actors())
        if len(engines) >= num_engines:
            return
        if time.monotonic() > deadline:
            raise ResourceError(
                f"the rollout servers have {len(engines)} of {num_engines} processes after "
                f"{timeout_s:g} s (rollout.engine.start_timeout_s); does the cluster hold what "
                "they ask for?"
            )
        time.sleep(_POLL_S)


def engines_of(app_name: str, actors: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """Names of the engines whose replicas are among these rows of Ray's table of actors."""
    replica = f"SERVE_REPLICA::{app_name}#"
    names = [a["Name"].split("#")[1] for a in actors if a["Name"].startswith(replica)]
    return tuple(sorted(name for name in names if name.startswith("engine-")))


def _applications() -> Mapping[str, ApplicationStatusOverview] | None:
    """What runs on Serve; None while it is in the midst of a change, and cannot say."""
    try:
        with _alone():
            return serve.status().applications
    except (RayTaskError, ActorUnavailableError, ValueError) as error:
        logger.debug("Serve cannot say what runs on it: %s", error)
        return None


def stop_rollout_servers(app_name: str) -> None:
    """Take the application away.

    An error is logged: whoever calls this has more to take away, or an error of its own to tell.

    Waits for: Serve. Unblocked by: the end of the application, or `_DELETION_S`.
    """
    try:
        with _alone():
            if app_name in serve.status().applications:
                serve.delete(app_name, _blocking=False)
        deadline = time.monotonic() + _DELETION_S
        while (left := _applications()) is None or app_name in left:
            if time.monotonic() > deadline:
                raise TimeoutError(f"it is there after {_DELETION_S:g} s")
            time.sleep(_LOOK_S)
    except (RayError, RayServeException, TimeoutError, ValueError) as error:
        logger.warning("Serve application %s could not be deleted: %s", app_name, error)


def end_serve(app_name: str | None = None) -> bool:
    """Take Serve away if nothing runs on it, and no run holds a lease that may begin to use it.

    An error is logged.

    Args:
        app_name: Of the run that ends, if it holds its lease yet.

    Returns:
        Whether Serve has ended.
    """
    try:
        if is_leased_to_others(app_name) or _applications() != {}:
            return False
        with _alone():
            serve.shutdown()
    except (RayError, RayServeException, TimeoutError, ValueError) as error:
        logger.warning("Serve could not be ended: %s", error)
        return False
    return True
