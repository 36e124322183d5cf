"""What an engine says once its core was killed, which vLLM tells those who wait for it never."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import psutil
import pytest
import ray.cloudpickle

from ray_apr.core.exceptions import EngineDiedError, EngineUnavailableError
from ray_apr.core.messages import WeightGroup
from tests.fakes import generate_request
from tests.tiny_model import make_tiny_model
from tests.vllm.engines import FREE, PROMPT, Trainer, make_engine, running

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(120)]

LIMIT_S = 15.0
"""Far below any limit of a sync or of a request."""


async def test_an_engine_whose_core_is_killed_tells_all_who_wait_for_it(tmp_path):
    folder = make_tiny_model(tmp_path / "model")

    def generate(name: str) -> asyncio.Task:
        call = engine.generate(
            generate_request(request_id=name, token_ids=PROMPT, sampling=FREE, max_tokens=400)
        )
        return asyncio.create_task(call)

    async with running(make_engine(folder)) as engine:
        inside = generate("inside")
        while not engine.status().num_running:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await engine.pause("keep")
        at_gate = generate("at the gate")
        # it waits in the core for a trainer that does not come
        endpoint = Trainer(folder).sender.open(1, host="127.0.0.1", timeout_s=100.0)
        group = WeightGroup(timeout_s=100.0, endpoint=ray.cloudpickle.dumps(endpoint))
        joining = asyncio.create_task(engine.join_weight_group(group, 1))
        await asyncio.sleep(1.0)
        assert engine.status().is_paused and not joining.done()
        (core,) = engine._core.llm.engine_core.resources.engine_manager.processes
        assert psutil.Process(core.pid).ppid() != os.getpid(), "the fork server has forked it"
        os.kill(core.pid, signal.SIGKILL)
        killed = time.monotonic()
        for waiting in (joining, inside, at_gate):
            with pytest.raises(EngineUnavailableError, match="is dead"):
                await asyncio.wait_for(waiting, LIMIT_S)
        with pytest.raises(EngineDiedError):
            engine.status()
        verbs = engine.pause("abort"), engine.receive_weights(1), engine.sleep("abort")
        for verb in (*verbs, engine.resume()):
            with pytest.raises(EngineDiedError):
                await asyncio.wait_for(verb, LIMIT_S)
        assert await engine.abort(["inside", "unknown"]) == 0
        with pytest.raises(EngineUnavailableError, match="is dead"):
            await asyncio.wait_for(generate("late"), LIMIT_S)
        assert time.monotonic() - killed < LIMIT_S
