"""vLLM's executors as engines on GPUs have them (serve/vllm: executor.py, forked_worker.py)."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from types import SimpleNamespace

import psutil
import pytest

pytest.importorskip("vllm")

from vllm.v1.executor.multiproc_executor import WorkerProc

from ray_apr.core.exceptions import SYNC_BROKEN, EngineDiedError, SyncBrokenError
from ray_apr.serve.vllm import weights
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


class Queue:
    """Of a worker's answers."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.num_waits = 0

    def dequeue(self, timeout=None, **_):
        if self.answers[0] is None:
            self.num_waits += 1
            del self.answers[0]
            raise TimeoutError
        return self.answers.pop(0)


def executor_of(*queues):
    executor = NamespacedRayExecutor.__new__(NamespacedRayExecutor)
    executor.rpc_broadcast_mq = SimpleNamespace(enqueue=lambda _: None)
    executor.response_mqs = list(queues)
    executor.futures_queue = deque()
    executor.is_failed = False
    return executor


def test_an_error_leaves_no_worker_s_answer_to_the_next_call():
    """known fault: the next try of a weight sync failed of the last one's error, and from then on
    an engine of several GPUs was told what its workers had said of the sync before."""
    status = WorkerProc.ResponseStatus
    failed, first, second = (status.FAILURE, "no peer"), (status.SUCCESS, 1), (status.SUCCESS, 2)
    queues = Queue(failed, first, second), Queue(None, failed, first, (status.FAILURE, "no room"))
    executor = executor_of(*queues)
    with pytest.raises(RuntimeError, match=r"no peer$"):
        executor.collective_rpc("update_weights")
    assert queues[1].num_waits == 1
    assert executor.collective_rpc("update_weights") == [1, 1]
    with pytest.raises(RuntimeError, match="no room"):
        executor.collective_rpc("update_weights")
    assert executor.response_mqs == list(queues)


def test_a_worker_that_failed_for_good_is_the_cause_of_the_syncs_that_broke_off():
    """known fault: the run tried such a sync four times, as the other workers might be mended."""
    failure = WorkerProc.ResponseStatus.FAILURE
    broken = Queue((failure, f"{SYNC_BROKEN}: a peer did not come"))
    executor = executor_of(broken, Queue((failure, "cannot import the weight transport")))
    with pytest.raises(RuntimeError) as raised:
        executor.collective_rpc("init_weight_transfer_engine")
    error = weights._sync_error(str(raised.value))
    assert str(error) == "workers failed: cannot import the weight transport"
    assert not isinstance(error, SyncBrokenError)


def test_who_answers_alone_is_asked_alone():
    status = WorkerProc.ResponseStatus
    other = Queue()
    executor = executor_of(Queue((status.SUCCESS, 1), (status.SUCCESS, 2)), other)
    assert executor.collective_rpc("step", unique_reply_rank=0) == 1
    assert executor.collective_rpc("step", non_block=True, unique_reply_rank=0).result() == 2


def test_a_start_ends_with_the_first_worker_s_error():
    """The other one may wait for the one that has failed."""
    other = Queue()
    executor = executor_of(Queue((WorkerProc.ResponseStatus.FAILURE, "out of memory")), other)
    with pytest.raises(RuntimeError, match="out of memory"):
        executor.collective_rpc("determine_available_memory")


def test_a_dead_worker_s_answer_is_not_waited_for():
    executor = executor_of(Queue((WorkerProc.ResponseStatus.FAILURE, "no peer")), Queue(None, None))
    executor.rpc_broadcast_mq.enqueue = lambda _: setattr(executor, "is_failed", True)
    with pytest.raises(RuntimeError, match="no peer"):
        executor.collective_rpc("update_weights")
    assert executor.response_mqs[1].num_waits == 1


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
