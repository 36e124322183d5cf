"""What vLLM is started with: arguments, and environment of the process that holds it."""

from __future__ import annotations

import os
from typing import Any

from ray_apr.config.common import ENGINE_GPU_SHARE
from ray_apr.config.engine_options import OF_MEMORY
from ray_apr.serve.spec import EngineSpec
from ray_apr.serve.vllm.names import (
    MOST_REQUESTS,
    PARKING_SCHEDULER,
    SCHEDULER,
    WORKER_EXTENSION,
)

_MAX_LOGPROBS = 20
"""vLLM's own limit of the log-probs of a token, which a `top_k` may raise."""
_MEMORY_IN_TURNS, _MEMORY_BESIDE = 0.8, 0.5
"""Shares of a GPU's memory that an engine takes where a train worker is on it, too: in turns, when
that has its CUDA context alone, and for a moment the gathered weights; or at all times."""
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
RAY_EXECUTOR = "ray_apr.serve.vllm.executor.NamespacedRayExecutor"
FORKING_EXECUTOR = "ray_apr.serve.vllm.forked_worker.ForkedWorkerExecutor"
CPU_ARGUMENTS = {"block_size": 32, "enforce_eager": True, "enable_chunked_prefill": False}
"""vLLM's arguments on CPU. A prompt that is prefilled in two steps kills it there, if its request
has a seed: vLLM turns the generator back, and those of the CPU have no offset."""


def gpu_share(spec: EngineSpec) -> float:
    """What an engine worker reserves of a GPU."""
    return ENGINE_GPU_SHARE if spec.shares_device else 1.0


def has_worker_actors(spec: EngineSpec) -> bool:
    """Whether the workers of an engine are Ray actors with a GPU each. The worker of a single GPU
    is forked from the engine core, which saves the seconds in which an actor imports vLLM."""
    return spec.device == "cuda" and spec.tensor_parallel_size > 1


def environment(spec: EngineSpec, namespace: str) -> dict[str, str]:
    """Variables that the engine's process needs; those that are set in this process win.

    Args:
        spec: What the engine is built from.
        namespace: Ray's, of the run.
    """
    wanted = environment_on(spec.device)
    if has_worker_actors(spec):
        of_actors = {
            "RAY_APR_NAMESPACE": namespace,
            "VLLM_RAY_PER_WORKER_GPUS": str(gpu_share(spec)),
        }
        wanted |= _unless_set(of_actors)
    return wanted


def environment_on(device: str) -> dict[str, str]:
    """The same of each engine on a device."""
    return _unless_set(_QUIET_ENVIRONMENT | ({} if device == "cuda" else CPU_ENVIRONMENT))


def _unless_set(variables: dict[str, str]) -> dict[str, str]:
    return {name: os.environ.get(name, value) for name, value in variables.items()}


def engine_arguments(spec: EngineSpec) -> dict[str, Any]:
    """Arguments of vLLM: the run's own, and those that the user may tune."""
    ours: dict[str, Any] = {
        "dtype": spec.dtype,
        "max_model_len": spec.max_model_len,
        "tensor_parallel_size": spec.tensor_parallel_size,
        "logprobs_mode": "processed_logprobs",  # of the distribution that is drawn from
        "seed": spec.seed,
        "max_logprobs": max(_MAX_LOGPROBS, spec.support_size),
        "generation_config": "vllm",
        "disable_log_stats": False,  # exported through Ray, whose tags are ASCII
        "served_model_name": spec.model.encode("ascii", "backslashreplace").decode(),
        "enable_prefix_caching": True,
        "scheduler_cls": PARKING_SCHEDULER if spec.parks else SCHEDULER,
        "worker_extension_cls": WORKER_EXTENSION,
    }
    if spec.device == "cuda":
        ours["distributed_executor_backend"] = (
            RAY_EXECUTOR if has_worker_actors(spec) else FORKING_EXECUTOR
        )
        ours["worker_cls"] = "ray_apr.serve.vllm.worker.DeviceWorker"
        if spec.most_requests is not None and not OF_MEMORY & spec.engine_kwargs.keys():
            ours["additional_config"] = {MOST_REQUESTS: spec.most_requests}
        if spec.takes_turns:
            ours |= {"enable_sleep_mode": True, "gpu_memory_utilization": _MEMORY_IN_TURNS}
        elif spec.shares_device:
            ours["gpu_memory_utilization"] = _MEMORY_BESIDE
    else:
        ours |= CPU_ARGUMENTS
    if spec.evaluates:
        ours["scheduling_policy"] = "priority"
    return {**ours, **spec.engine_kwargs}
