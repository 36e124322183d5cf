"""What the fakes of vLLM's scheduler have in common; none has a model."""

from __future__ import annotations

from types import SimpleNamespace

from vllm.config import CUDAGraphMode
from vllm.v1.core.sched.interface import PauseState


class BareScheduler:
    """Requests by their ids, which end from outside or are paused."""

    max_num_running_reqs = 100

    def __init__(self, graphs="NONE", **additional_config):
        self.requests = {}
        self.pause_state = PauseState.UNPAUSED
        self.vllm_config = SimpleNamespace(
            additional_config=additional_config,
            compilation_config=SimpleNamespace(cudagraph_mode=CUDAGraphMode[graphs]),
        )

    def has_requests(self):
        return bool(self.requests) and self.pause_state == PauseState.UNPAUSED

    def set_pause_state(self, pause_state):
        self.pause_state = pause_state

    def finish_requests(self, names, status):
        names = list(self.requests) if names is None else names
        return [self.requests.pop(name) for name in names if name in self.requests]
