"""Makes the Serve application of the rollout servers, starts it, and takes it away."""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import HTTPOptions, RequestRouterConfig
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatus

from ray_apr.config import KVCache, RolloutConfig
from ray_apr.config.common import ENGINE_GPU_SHARE
from ray_apr.exceptions import ResourceError
from ray_apr.ray_private import session_router
from ray_apr.serve.ingress import build_ingress
from ray_apr.serve.names import DEPLOYMENT, SCHEDULER, WORKER_EXTENSION
from ray_apr.serve.server import RolloutServer

logger = logging.getLogger(__name__)

_POLL_S = 0.5

_MAX_LOGPROBS = 20
"""vLLM's own limit of the log-probs of a token, which a `top_k` may raise."""
_COLOCATED_MEMORY = 0.8
"""Share of a GPU's memory that an engine takes while it is awake; a train worker then still has its
CUDA context, and for a moment the gathered weights."""
_QUIET_ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
CPU_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "TORCH_COMPILE_DISABLE": "1",
}
"""A worker inside the engine core, little memory, one thread: engines share the cores with the
trainer. Even an eager engine would call the C++ compiler at its first request, to count ranks. A
variable that is set outside wins."""
CPU_ARGUMENTS = {"block_size": 32, "enforce_eager": True, "enable_chunked_prefill": False}
"""vLLM's arguments on CPU. A prompt that is prefilled in two steps kills it there, if its request
has a seed: vLLM turns the generator back, and those of the CPU have no offset."""


def build_rollout_app(
    *,
    model: str,
    config: RolloutConfig,
    kv_cache: KVCache = "recompute",
    needs_attestation: bool = False,
    max_model_len: int | None = None,
    on_cuda: bool = False,
    evaluates: bool = False,
) -> serve.Application:
    """Bind the deployment of the rollout servers, behind an HTTP ingress if one is asked for.

    Args:
        model: Folder or hub id.
        config: Replicas, devices, engine arguments, HTTP.
        kv_cache: What becomes of KV entries of old weights at a weight sync.
        needs_attestation: Whether requests go on across weight syncs, so that vLLM has to tell the
            version of each token.
        max_model_len: Longest prompt + response, in tokens; None takes the model's.
        on_cuda: Whether the engines run on GPUs.
        evaluates: Whether some requests are evaluations, which go first in an engine's queue.
    """
    arguments = engine_arguments(config, max_model_len, on_cuda)
    if evaluates:
        arguments = {"scheduling_policy": "priority", **arguments}
    deployment = serve.deployment(
        RolloutServer,
        name=DEPLOYMENT,
        num_replicas=config.num_replicas,
        max_ongoing_requests=100_000,
        max_constructor_retry_count=2,
        request_router_config=RequestRouterConfig(request_router_class=session_router()),
        graceful_shutdown_timeout_s=2.0,
        graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=5.0,
        health_check_timeout_s=60.0,
        ray_actor_options=_actor_options(config, on_cuda),
        **_placement(config, on_cuda),
    )
    servers = deployment.bind(
        model,
        arguments,
        kv_cache == "keep",
        config.stall_timeout_s,
        config.is_colocated,
        needs_attestation,
    )
    if config.http_port is None:
        return servers
    return build_ingress(servers, config, max_model_len)


def _actor_options(config: RolloutConfig, on_cuda: bool) -> dict[str, Any]:
    gpu_environment = {
        "RAY_APR_NAMESPACE": ray.get_runtime_context().namespace,
        "VLLM_RAY_PER_WORKER_GPUS": str(_gpu_share(config)),
    }
    wanted = _QUIET_ENVIRONMENT | (gpu_environment if on_cuda else CPU_ENVIRONMENT)
    env = {name: os.environ.get(name, value) for name, value in wanted.items()}
    return {"num_cpus": config.num_cpus_per_replica, "runtime_env": {"env_vars": env}}


def _placement(config: RolloutConfig, on_cuda: bool) -> dict[str, Any]:
    """On GPUs the workers are Ray actors in bundles of their own, with one GPU or their share."""
    if not on_cuda:
        return {}
    bundles = [{"CPU": config.num_cpus_per_replica}]
    gpu = {"CPU": 1, "GPU": _gpu_share(config)}
    bundles += [gpu for _ in range(config.tensor_parallel_size)]
    return {"placement_group_bundles": bundles, "placement_group_strategy": "PACK"}


def _gpu_share(config: RolloutConfig) -> float:
    """What an engine worker reserves of a GPU."""
    return ENGINE_GPU_SHARE if config.is_colocated else 1.0


def engine_arguments(
    config: RolloutConfig, max_model_len: int | None, on_cuda: bool
) -> dict[str, Any]:
    """Arguments of vLLM: the run's own, and those that the user may tune.

    Raises:
        ConfigError: For what ends an engine on CPU, where it is one.
    """
    ours: dict[str, Any] = {
        "dtype": config.dtype,
        "max_model_len": max_model_len,
        "tensor_parallel_size": config.tensor_parallel_size,
        "logprobs_mode": "processed_logprobs",  # of the distribution that is drawn from
        "seed": config.engine_seed,
        "max_logprobs": max(_MAX_LOGPROBS, config.sampling.support_size),
        "generation_config": "vllm",
        "disable_log_stats": False,  # exported through Ray
        "enable_prefix_caching": True,
        "scheduler_cls": SCHEDULER,
        "worker_extension_cls": WORKER_EXTENSION,
    }
    if on_cuda:
        ours["distributed_executor_backend"] = "ray_apr.serve.executor.NamespacedRayExecutor"
        ours["worker_cls"] = "ray_apr.serve.worker.DeviceWorker"
        if config.is_colocated:
            ours |= {"enable_sleep_mode": True, "gpu_memory_utilization": _COLOCATED_MEMORY}
    else:
        config.check_on_cpu()
        ours |= CPU_ARGUMENTS
    return {**ours, **config.engine_kwargs}


def start_rollout_servers(
    app_name: str,
    *,
    model: str,
    config: RolloutConfig,
    kv_cache: KVCache = "recompute",
    needs_attestation: bool = False,
    max_model_len: int | None = None,
    evaluates: bool = False,
    cancelled: threading.Event | None = None,
) -> None:
    """Start the servers and wait until all of them are ready.

    Args:
        app_name: Name of the Serve application.
        model: Folder or hub id.
        config: Replicas, devices, engine arguments, HTTP.
        kv_cache: What becomes of KV entries of old weights at a weight sync.
        needs_attestation: Whether requests go on across weight syncs, so that vLLM has to tell the
            version of each token.
        max_model_len: Longest prompt + response, in tokens; None takes the model's.
        evaluates: Whether some requests are evaluations, which go first in an engine's queue.
        cancelled: Another thread sets it to end the wait.

    Raises:
        ResourceError: If they are not ready within ``start_timeout_s``, one cannot start, or the
            wait was cancelled; the application is then taken away.
    """
    on_cuda = config.device == "cuda" or (
        config.device == "auto" and ray.cluster_resources().get("GPU", 0) >= 1
    )
    app = build_rollout_app(
        model=model,
        config=config,
        kv_cache=kv_cache,
        needs_attestation=needs_attestation,
        max_model_len=max_model_len,
        on_cuda=on_cuda,
        evaluates=evaluates,
    )
    if config.http_port is None:
        serve.start(http_options=HTTPOptions(location="NoServer"))
    else:
        serve.start(http_options=HTTPOptions(host=config.http_host, port=config.http_port))
    route = None if config.http_port is None else "/"
    serve.run_many(
        [serve.RunTarget(target=app, name=app_name, route_prefix=route)],
        wait_for_applications_running=False,
    )
    try:
        _wait_until_running(app_name, config.start_timeout_s, cancelled or threading.Event())
    except ResourceError:
        stop_rollout_servers(app_name)
        raise


def _wait_until_running(app_name: str, timeout_s: float, cancelled: threading.Event) -> None:
    """Wait for all replicas; Serve itself would retry a failing constructor without end."""
    deadline = time.monotonic() + timeout_s
    while True:
        app = serve.status().applications.get(app_name)
        if app is not None and app.status == ApplicationStatus.RUNNING:
            return
        deployment = app.deployments.get(DEPLOYMENT) if app is not None else None
        message = (deployment.message if deployment else "") or (app.message if app else "")
        if app is not None and app.status == ApplicationStatus.DEPLOY_FAILED:
            raise ResourceError(f"the rollout servers cannot start: {message}")
        if time.monotonic() > deadline:
            raise ResourceError(
                f"the rollout servers are not ready after {timeout_s:g} s (rollout.start_timeout_s)"
                f": {message or 'Serve gives no reason'}; does the cluster hold what they ask for?"
            )
        if cancelled.wait(_POLL_S):
            raise ResourceError("the start of the rollout servers was cancelled")


def stop_rollout_servers(app_name: str) -> None:
    """Take the application away, and Serve itself if nothing else runs on it.

    An error is logged: whoever calls this has more to take away, or an error of its own to tell.
    """
    try:
        if app_name in serve.status().applications:
            serve.delete(app_name)
        if not serve.status().applications:
            serve.shutdown()
    except (RayError, RayServeException, TimeoutError) as error:
        logger.warning("Serve application %s could not be deleted: %s", app_name, error)
