"""Engines on GPUs that start where others ran before."""

from __future__ import annotations

import asyncio

import pytest
import ray
import torch

from ray_apr.config import RolloutConfig
from ray_apr.core.messages import SamplingParams
from ray_apr.serve.builder import start_rollout_servers, stop_rollout_servers
from ray_apr.serve.client import ServeRolloutClient
from ray_apr.serve.spec import EngineSpec
from tests.fakes import generate_request
from tests.processes import kill_all, marked_environment
from tests.whole_runs import CONFIG, running_cluster

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]

APP = "again"


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize(
    ("size", "num_compiled"),
    [(1, 1), pytest.param(2, 2, id="one engine of two GPUs")],
)
def test_engines_find_no_code_that_was_compiled_for_another_gpu(tmp_path, size, num_compiled):
    """The second time, each engine finds the code that was compiled before: of engines of one GPU,
    each of which sees its own alone, one has it from the other; of an engine of two GPUs each
    worker has its own."""
    mark, env = marked_environment()
    env |= {"VLLM_CACHE_ROOT": str(tmp_path)}
    config = RolloutConfig(
        num_replicas=2 // size,
        max_response_tokens=8,
        engine={
            "tensor_parallel_size": size,
            "device": "cuda",
            "dtype": "float32",
            "kwargs": {"max_num_seqs": 8, "gpu_memory_utilization": 0.2},
        },
    )

    async def answers() -> set[str]:
        client = ServeRolloutClient(APP, config)
        generations = await asyncio.gather(*(
            client.generate(generate_request(
                request_id=f"{i}", session_id=f"{i}", token_ids=(5, 6, 7), max_tokens=4,
                sampling=SamplingParams(ignore_eos=True),
            ))
            for i in range(8)
        ))  # fmt: skip
        assert [g.num_tokens for g in generations] == [4] * 8
        return {g.replica_id for g in generations}

    try:
        with running_cluster(env) as (address, _):
            ray.init(address, namespace="ray_apr_test", log_to_driver=False)
            try:
                for _ in range(2):
                    model = str(CONFIG.parent / "base_model")
                    start_rollout_servers(APP, EngineSpec.of_run(model, config), config)
                    assert len(asyncio.run(answers())) == config.num_replicas
                    stop_rollout_servers(APP)
            finally:
                ray.shutdown()
    finally:
        kill_all(mark)
    assert len(list(tmp_path.glob("torch_compile_cache/*/*/rank_*/model"))) == num_compiled
