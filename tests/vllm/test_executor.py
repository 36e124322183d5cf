"""vLLM's executors as engines on GPUs have them (serve/vllm: executor.py, forked_worker.py)."""

from __future__ import annotations

import asyncio
import os

import psutil
import pytest

pytest.importorskip("vllm")

from ray_apr.core.exceptions import EngineDiedError
from ray_apr.serve.vllm.arguments import FORKING_EXECUTOR
from ray_apr.serve.vllm.executor import NamespacedRayExecutor
from ray_apr.serve.vllm.forked_worker import ForkedWorkerExecutor
from tests.fakes import generate_request
from tests.tiny_model import make_tiny_model
from tests.vllm.engines import FREE, PROMPT, make_engine, running

pytestmark = pytest.mark.vllm


def test_engines_that_start_together_look_for_ports_in_other_places():
    ports = {NamespacedRayExecutor._select_tcpstore_port(0, 0) for _ in range(8)}
    assert len(ports) > 1 and min(ports) >= 1024


def test_the_worker_of_one_gpu_is_forked_whatever_the_server_has_set(monkeypatch):
    name, said = "VLLM_WORKER_MULTIPROC_METHOD", []
    monkeypatch.setenv(name, "spawn")
    vllms = ForkedWorkerExecutor.__mro__[1]
    monkeypatch.setattr(vllms, "_init_executor", lambda self: said.append(os.environ[name]))
    ForkedWorkerExecutor.__new__(ForkedWorkerExecutor)._init_executor()
    assert said == ["fork"]


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("victim", ["core", "worker"])
async def test_a_forked_worker_and_its_core_end_together(tmp_path, victim):
    """What the worker has of a GPU is free again, whichever of them is killed."""
    folder = make_tiny_model(tmp_path / "model")
    engine = make_engine(folder, distributed_executor_backend=FORKING_EXECUTOR)
    async with running(engine):
        made = await engine.generate(
            generate_request(request_id="r", token_ids=PROMPT, sampling=FREE, max_tokens=4)
        )
        assert made.num_tokens == 4
        (process,) = engine._core.llm.engine_core.resources.engine_manager.processes
        core = psutil.Process(process.pid)
        (worker,) = core.children()
        {"core": core, "worker": worker}[victim].kill()
        _, alive = await asyncio.to_thread(psutil.wait_procs, [core, worker], timeout=15)
        assert not alive
        with pytest.raises(EngineDiedError):
            engine.status()
