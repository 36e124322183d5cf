"""vLLM's GPU worker, whose compiled code stays with the device that it was compiled for."""

from __future__ import annotations

from ray_apr.serve.vllm_private import Worker

DEVICE = "ray_apr_device_index"


class DeviceWorker(Worker):  # type: ignore[misc]
    """Keeps what vLLM compiles and tunes apart for each device; a new one begins anew.

    Under vLLM's Ray executor a process sees all GPUs of its host and uses the one that Ray has
    assigned. Compiled code names that device, but vLLM (0.26 to 0.32) finds it again by the
    configuration and the rank alone: an engine that starts where others ran before would load what
    was compiled for another GPU, and fail with tensors on two devices.
    """

    def init_device(self) -> None:
        """Choose the device, and make it a part of the hash that compiled code is found by."""
        super().init_device()
        additional = self.vllm_config.additional_config
        if isinstance(additional, dict):  # in place: the model runner may have copied its owner
            additional[DEVICE] = self.device.index
