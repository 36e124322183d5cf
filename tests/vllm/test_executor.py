"""vLLM's Ray executor as engines on GPUs have it (serve/vllm/executor.py)."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from ray_apr.serve.vllm.executor import NamespacedRayExecutor

pytestmark = pytest.mark.vllm


def test_engines_that_start_together_look_for_ports_in_other_places():
    ports = {NamespacedRayExecutor._select_tcpstore_port(0, 0) for _ in range(8)}
    assert len(ports) > 1 and min(ports) >= 1024
