"""vLLM's own metrics through Ray, beside the accounting of the adapter (serve/vllm/stats.py)."""

from __future__ import annotations

import asyncio

import pytest

from ray_apr.tools.grafana.queries import VLLM_METRICS
from tests.fakes import RayMetrics, generate_request
from tests.tiny_model import make_tiny_model
from tests.vllm.engines import FREE, PROMPT, make_engine, running

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(300)]


async def made(engine, num_requests: int, max_tokens: int) -> int:
    """Tokens of so many requests at once, as the adapter counts them."""
    calls = [
        engine.generate(
            generate_request(
                request_id=f"r{i}", token_ids=PROMPT, sampling=FREE, max_tokens=max_tokens
            )
        )
        for i in range(num_requests)
    ]
    generations = await asyncio.gather(*calls)
    assert sum(g.num_tokens for g in generations) == num_requests * max_tokens
    return engine.status().tokens_made


@pytest.mark.parametrize("is_off", [False, True])
def test_vllms_metrics_agree_with_the_adapters_figures(tmp_path, monkeypatch, is_off):
    shown = RayMetrics().install(monkeypatch)

    async def run() -> int:
        async with running(make_engine(make_tiny_model(tmp_path), disable_log_stats=is_off)) as e:
            return await made(e, num_requests=24, max_tokens=64)

    assert asyncio.run(run()) == 24 * 64
    found: dict[str, list[float]] = {}
    for (name, tags), values in shown.values.items():
        if name.startswith("vllm"):
            assert "ReplicaId" in dict(tags)
            found.setdefault(name, []).extend(values)
    if is_off:
        assert found == {}
        return
    assert sum(found["vllm_generation_tokens"]) == 24 * 64
    assert max(found["vllm_num_requests_running"]) == 24
    assert max(found["vllm_kv_cache_usage_perc"]) > 0
    assert sum(found["vllm_request_success"]) == 24
    latencies = len(found["vllm_inter_token_latency_seconds"])
    assert 0 < latencies <= 24 * 63 / 2, "a value for each token would cost too much"
    exported = {f"ray_{n}" + "_total" * (kind == "Counter") for n, kind in shown.made.items()}
    assert set(VLLM_METRICS) <= exported, "the dashboard shows what vLLM does not have"
