"""vLLM's GPU worker: its memory is what requests need, its compiled code stays with its device,
and float32 is float32."""

from __future__ import annotations

import os

import torch

from ray_apr.serve.vllm.names import MOST_REQUESTS
from ray_apr.serve.vllm.private import Worker

DEVICE = "ray_apr_device_index"
FLOAT32_PRODUCTS = "TRITON_F32_DEFAULT"
"""Triton's variable of how it multiplies float32; one that is set outside wins."""


class DeviceWorker(Worker):  # type: ignore[misc]
    """Keeps what vLLM compiles and tunes apart for each device; a new one begins anew.

    Under vLLM's Ray executor, which engines of several GPUs have, a process sees all GPUs of its
    host and uses the one that Ray has assigned. Compiled code names that device, but vLLM (0.26 to
    0.32) finds it again by the configuration and the rank alone: an engine that starts where others
    ran before would load what was compiled for another GPU, and fail with tensors on two devices.

    vLLM's attention for float32 is a Triton kernel, whose products are TF32 unless Triton is told
    otherwise: log-probs then differ from the trainer's by hundredths of a nat.
    """

    _most_requests: int | None = None
    """For how many it has a KV cache; None: for as many as there is memory for."""

    def init_device(self) -> None:
        """Choose the device, and make it a part of the hash that compiled code is found by."""
        model = self.vllm_config.model_config
        if model is not None and model.dtype is torch.float32:
            os.environ.setdefault(FLOAT32_PRODUCTS, "ieee")
        super().init_device()
        additional = self.vllm_config.additional_config
        if isinstance(additional, dict):  # in place: the model runner may have copied its owner
            additional[DEVICE] = self.device.index
            # compiled code is the same for any number of them
            self._most_requests = additional.pop(MOST_REQUESTS, None)

    def determine_available_memory(self) -> int:
        """Memory of the KV cache, in bytes: what `_most_requests` of full length take, or all that
        vLLM may have if that is less. vLLM itself takes all of it, and makes an object of each of
        its blocks: of a small model millions, in seconds."""
        available: int = super().determine_available_memory()
        if self._most_requests is None:
            return available
        specs = self.get_kv_cache_spec().values()
        of_one = sum(spec.max_memory_usage_bytes(self.vllm_config) for spec in specs)
        return min(available, (self._most_requests + 1) * of_one)  # vLLM keeps a block to itself
