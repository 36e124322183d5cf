"""Engines whose nodes are drained give their requests back (serve/server.py)."""

from __future__ import annotations

import asyncio
import pickle
from types import SimpleNamespace

import pytest
from ray.exceptions import RayActorError, RayTaskError, RpcError

from ray_apr.config import BufferConfig, RolloutConfig
from ray_apr.core.exceptions import EngineDiedError, EngineUnavailableError
from ray_apr.rollout import worker as worker_module
from ray_apr.serve import server as module
from ray_apr.serve.server import RolloutServer
from tests.rollout_run import running, without_ray
from tests.slow_engines import slow_engines
from tests.virtual_time import run_in_virtual_time

LONG = 160_000
SPEED = 40.0
"""Tokens a second of each request: a response takes 4,000 s."""
SETTINGS = {"max_staleness": 4, "oversampling_factor": 2.0}
BUFFER = BufferConfig(poll_timeout_s=20, wait_timeout_s=600)


@pytest.fixture
def no_ray(monkeypatch):
    without_ray(monkeypatch)
    monkeypatch.setattr(worker_module, "_HEARTBEAT_S", 5.0)


def calls_of(replica) -> int:
    return replica.server._engine.status(drain=False).num_running


@pytest.mark.parametrize("is_in_sync", [False, True])
def test_a_drained_engine_gives_its_requests_to_another_one(monkeypatch, no_ray, is_in_sync):
    async def work() -> None:
        rollout, loop = {"max_response_tokens": LONG, "num_replicas": 2}, asyncio.get_running_loop()
        with slow_engines(
            monkeypatch, RolloutConfig(**rollout), tokens_per_s=SPEED, lengths=lambda sample: LONG
        ) as (serve, client):
            async with running(client, rollout=rollout, limit_s=20_000, **SETTINGS) as run:
                await asyncio.sleep(60)
                stays, goes = serve.replicas
                assert calls_of(stays) and calls_of(goes)
                num_calls, begun = calls_of(stays) + calls_of(goes), loop.time()
                if is_in_sync:
                    await client.pause("keep")
                await goes.server.leave()
                assert loop.time() - begun < 11, "a tick"
                if is_in_sync:
                    await client.resume()
                await asyncio.sleep(20)
                assert (calls_of(stays), calls_of(goes)) == (num_calls, 0)
                state = await client.weight_group_state()
                assert (set(state.first_ranks), state.is_whole) == ({"engine-0"}, False)
                goes.died.set()
                await asyncio.sleep(60)
            counted = {e.replica_id: e.tokens_generated for e in run.summary.engines}
            assert counted["engine-1"] > 0
            ledger = run.summary.ledger + (await run.buffer.stats()).ledger
            assert (ledger.error, ledger.generated) == (0, sum(counted.values()))
            assert run.summary.samples_resumed > 0

    run_in_virtual_time(monkeypatch, work)


def test_the_tokens_of_the_only_engine_wait_for_the_next_one(monkeypatch, no_ray):
    async def work() -> None:
        rollout = {"max_response_tokens": LONG, "num_replicas": 1}
        with slow_engines(
            monkeypatch, RolloutConfig(**rollout), tokens_per_s=SPEED, lengths=lambda sample: LONG
        ) as (serve, client):
            async with running(
                client, rollout=rollout, buffer=BUFFER, limit_s=20_000, **SETTINGS
            ) as run:
                await asyncio.sleep(60)
                num_calls = calls_of(serve.replicas[0])
                await serve.replicas[0].server.leave()
                await asyncio.sleep(20)
                held = run.worker._sessions.ledger.interrupted
                assert held > 0 and calls_of(serve.replicas[0]) == 0
                serve.replicas[0].died.set()
                await asyncio.sleep(60)
                assert run.worker._sessions.ledger.interrupted == held
                serve.add(1)
                await run.worker.scale(2)
                await asyncio.sleep(60)
                assert calls_of(serve.replicas[1]) == num_calls
                assert await run.buffer.failure() is None
            assert run.summary.ledger.discarded["lost"] == 0
            assert run.summary.ledger.generated > held

    run_in_virtual_time(monkeypatch, work)


async def test_a_server_sees_that_its_node_is_drained(monkeypatch):
    answers = [{}, RpcError("GCS is away"), {"other": 0.0}, {"here": 9.0}]

    def drained_nodes():
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(module, "drained_nodes", drained_nodes)
    monkeypatch.setattr(module, "_LOOK_S", 0.001)
    context = SimpleNamespace(get_node_id=lambda: "here")
    monkeypatch.setattr(module.ray, "get_runtime_context", lambda: context)
    server = RolloutServer.__new__(RolloutServer)
    server._calls, server._is_leaving = set(), False
    await asyncio.wait_for(server._watch_node(), 5)
    assert server._is_leaving and not answers


@pytest.mark.parametrize(
    ("error", "is_replaced_at_once"),
    [(EngineDiedError("its core is dead"), True), (EngineUnavailableError("it stalls"), False)],
)
async def test_serve_takes_a_server_whose_engine_is_dead_for_dead(error, is_replaced_at_once):
    async def check_health():
        raise error

    server = RolloutServer.__new__(RolloutServer)
    server._watch, server._engine = None, SimpleNamespace(check_health=check_health, replica_id="r")
    with pytest.raises((RayActorError, EngineUnavailableError)) as raised:
        await server.check_health()
    there = RayTaskError("check_health", "Traceback", pickle.loads(pickle.dumps(raised.value)))
    got = there.as_instanceof_cause()
    assert isinstance(got, RayActorError) == is_replaced_at_once
    assert str(error) in str(got.cause)


async def test_a_server_that_cannot_look_any_more_is_replaced(monkeypatch):
    server = RolloutServer.__new__(RolloutServer)
    server._watch = asyncio.get_running_loop().create_future()
    server._watch.set_exception(KeyError("a name that Ray has changed"))
    with pytest.raises(KeyError):
        await server.check_health()


def test_a_pause_that_interrupts_is_awaited_before_what_it_has_interrupted(monkeypatch, no_ray):
    async def work() -> None:
        with slow_engines(
            monkeypatch, RolloutConfig(), tokens_per_s=SPEED, lengths=lambda sample: LONG
        ) as (_, client):
            flows = []

            async def stop(*_, **__):
                flows.append(client._exchange._flows.is_set())

            monkeypatch.setattr(client, "_all", stop)
            for mode in ("abort", "keep", "wait"):
                await client.pause(mode)
            assert flows == [False, True, True]
            assert client._exchange._flows.is_set()

    run_in_virtual_time(monkeypatch, work)
