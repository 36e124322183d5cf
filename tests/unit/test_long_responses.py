"""Limits measure progress: the worker, the client, the servers and the buffer in virtual time."""

from __future__ import annotations

import asyncio
import logging

import pytest

from ray_apr.config import BufferConfig, RolloutConfig
from ray_apr.core.exceptions import EngineUnavailableError, RolloutError, StarvedError
from ray_apr.rollout import worker as worker_module
from tests.fakes import FIRST_TOKEN
from tests.rollout_run import running, without_ray
from tests.slow_engines import slow_engines
from tests.virtual_time import run_in_virtual_time

LONG = 160_000
SPEED = 40.0
"""Tokens a second of each request: a long response takes 4,000 s."""
SYNC = {
    "mode": "sync",
    "max_staleness": 0,
    "oversampling_factor": 1.0,
    "interrupt": "never",
    "admission": "batch",
    "overlap_rewards": False,
}
DRAIN = {"max_staleness": 1, "oversampling_factor": 2.0, "interrupt": "never", "drain": True}


@pytest.fixture(autouse=True)
def no_ray(monkeypatch):
    without_ray(monkeypatch)
    monkeypatch.setattr(worker_module, "_HEARTBEAT_S", 5.0)


def config(**rollout):
    return {"max_response_tokens": LONG, **rollout}


async def check_ledger(run) -> int:
    """Tokens that the engines made are all somewhere; returns how many."""
    ledger = run.summary.ledger + (await run.buffer.stats()).ledger
    assert ledger.error == 0
    assert sum(engine.tokens_generated for engine in run.summary.engines) == ledger.generated
    return ledger.generated


def is_whole(sample) -> bool:
    return sample.response_ids == tuple(range(FIRST_TOKEN, FIRST_TOKEN + sample.num_tokens))


APR = {"max_staleness": 4, "oversampling_factor": 2.0}


def calls_of(replica) -> int:
    return replica.server._engine.status(drain=False).num_running


@pytest.mark.parametrize("is_dead", [False, True])
def test_engines_come_and_go_and_no_token_is_lost(monkeypatch, is_dead):
    async def work() -> None:
        rollout, loop = config(num_replicas=2), asyncio.get_running_loop()
        with slow_engines(
            monkeypatch, RolloutConfig(**rollout), tokens_per_s=SPEED, lengths=lambda sample: LONG
        ) as (serve, client):
            client._max_inflight = 8  # else two requests more are no reason to leave an engine
            async with running(client, rollout=rollout, limit_s=20_000, **APR) as run:
                await asyncio.sleep(60)
                serve.add(2)
                await run.worker.scale(4)
                await asyncio.sleep(60)
                client._members = frozenset(replica.name for replica in serve.replicas)
                await run.sync(1)
                await asyncio.sleep(60)
                assert all(calls_of(replica) for replica in serve.replicas)
                if is_dead:
                    serve.replicas[3].died.set()
                began = loop.time()
                await run.worker.scale(2)
                assert loop.time() - began < 11, "a tick and an abort"
                assert [calls_of(replica) for replica in serve.replicas[2:3]] == [0]
                serve.replicas[2].died.set()  # Serve ends them
                serve.replicas[3].died.set()
                await asyncio.sleep(60)
                assert len(await client.status()) == 2
            assert len(run.summary.engines) == 4
            counted = {e.replica_id: e.tokens_generated for e in run.summary.engines}
            assert counted["engine-2"] > 0
            assert (counted["engine-3"] > 0) != is_dead
            assert run.summary.samples_resumed > 0
            await check_ledger(run)

    run_in_virtual_time(monkeypatch, work)


def test_engines_go_between_two_syncs(monkeypatch):
    async def work() -> None:
        rollout, done = config(num_replicas=2), []
        with slow_engines(
            monkeypatch, RolloutConfig(**rollout), tokens_per_s=SPEED, lengths=lambda sample: LONG
        ) as (_, client):
            async with running(client, rollout=rollout, limit_s=20_000, **APR) as run:

                async def scale(num_engines: int) -> None:
                    await run.worker.scale(num_engines)
                    done.append(num_engines)

                assert len((await run.worker.weight_group_state()).first_ranks) == 2
                leaving = asyncio.create_task(scale(1))
                await asyncio.sleep(30)
                assert len((await run.worker.weight_group_state()).first_ranks) == 2, "tried again"
                assert done == []
                await run.sync(1)
                await leaving
                assert len((await run.worker.weight_group_state()).first_ranks) == 1
                with pytest.raises(RolloutError, match="weight sync under way did not end"):
                    await run.worker.scale(2)
                assert len(await client.status()) == 1

    run_in_virtual_time(monkeypatch, work)


@pytest.mark.parametrize(
    "partial",
    [SYNC, APR, DRAIN],
    ids=["sync", "apr", "drain"],
)
def test_responses_of_160000_tokens_at_40_tokens_a_second_are_trained(monkeypatch, partial):
    """A call ended after 600 s, its tokens were lost, and the trainer starved after 300 s."""

    def lengths(sample_id: str) -> int:  # two groups end early, and are the first batch
        return 4_000 if sample_id.startswith(("e0-0", "e0-1")) else LONG

    async def work() -> None:
        rollout, loop = config(), asyncio.get_running_loop()
        with slow_engines(
            monkeypatch, RolloutConfig(**rollout), tokens_per_s=SPEED, lengths=lengths
        ) as (_, client):
            trained, began = [], loop.time()
            async with running(
                client, rollout=rollout, buffer=BufferConfig(), limit_s=20_000, **partial
            ) as run:
                for step in range(2):
                    trained += await run.step(step)
                    await run.sync(step + 1)
                took = loop.time() - began
            assert sorted({s.num_tokens for s in trained}) == [4_000, LONG]
            assert all(is_whole(sample) for sample in trained)
            assert 4_000 <= took < (5_000 if "drain" not in partial else 9_000)
            if "max_staleness" in partial and partial["max_staleness"] == 4:
                assert run.summary.samples_resumed > 0, "the first sync interrupted the long ones"
            await check_ledger(run)

    run_in_virtual_time(monkeypatch, work)


@pytest.mark.parametrize(
    "partial",
    [SYNC, {"max_staleness": 4, "oversampling_factor": 2.0}, DRAIN],
    ids=["sync", "apr", "drain"],
)
def test_a_gate_that_is_closed_for_an_hour_ends_nothing(monkeypatch, partial):
    async def work() -> None:
        rollout = {"max_response_tokens": 4_000}
        with slow_engines(
            monkeypatch, RolloutConfig(**rollout), tokens_per_s=SPEED, lengths=lambda _: 4_000
        ) as (_, client):
            async with running(
                client, rollout=rollout, buffer=BufferConfig(), limit_s=20_000, **partial
            ) as run:
                batches: asyncio.Queue = asyncio.Queue()
                reader = asyncio.create_task(read_ahead(run.buffer, batches))
                await run.buffer.grant(0, 0)
                for step in range(3):
                    # the gate; the reader has the batch, perhaps the next one, and goes on
                    await asyncio.sleep(3_600.0)
                    assert not reader.done() and 1 <= batches.qsize() <= 2
                    assert (await batches.get()).plan.step == step
                    await run.buffer.ack(step, step + 1)
                    await run.sync(step + 1)
            await reader
            await check_ledger(run)

    run_in_virtual_time(monkeypatch, work)


async def read_ahead(buffer, batches: asyncio.Queue) -> None:
    """As Ray Data reads a rank's stream."""
    last_step = None
    while (ticket := await buffer.take(0, last_step)) is None or ticket.plan is not None:
        if ticket is not None:
            last_step = ticket.plan.step
            await batches.put(ticket)


def test_a_stalled_engine_is_noticed_and_its_samples_go_on_elsewhere_with_their_tokens(
    monkeypatch, caplog
):
    """Its calls waited for 600 s and lost their tokens; every sample logged each second."""
    caplog.set_level(logging.WARNING)

    async def work() -> None:
        rollout, loop = (
            config(num_replicas=2, engine={"stall_timeout_s": 100.0}),
            asyncio.get_running_loop(),
        )
        with slow_engines(
            monkeypatch, RolloutConfig(**rollout), tokens_per_s=SPEED, lengths=lambda _: 20_000
        ) as (serve, client):
            async with running(
                client,
                rollout=rollout,
                buffer=BufferConfig(),
                limit_s=20_000,
                max_staleness=2,
                oversampling_factor=1.0,
            ) as run:
                await asyncio.sleep(200.0)
                stalled, other = serve.replicas
                engines = [replica.server._engine for replica in (stalled, other)]
                assert [engine.status().num_running for engine in engines] == [2, 2]
                stalled.llm.is_hung, hung_at = True, loop.time()
                await asyncio.sleep(89.0)
                assert not stalled.server._engine.status().is_stalled
                await asyncio.sleep(12.0)
                assert stalled.server._engine.status().is_stalled
                assert stalled.server._engine.status().num_running == 0
                assert stalled.server._engine.status().tokens_generated > 0, "they came out"
                trained = await run.step(0)
                assert all(is_whole(sample) for sample in trained)
                assert {sample.num_interruptions for sample in trained} == {0, 1}
                assert stalled.died.is_set() and stalled.unhealthy_at[0] - hung_at < 110.0
            await check_ledger(run)

    run_in_virtual_time(monkeypatch, work)
    told = [r.message for r in caplog.records if r.name == "ray_apr.rollout.failures"]
    assert len(told) <= 2, "once when they wait, once when they go on"


def test_a_starved_trainer_learns_what_has_not_moved(monkeypatch):
    async def work() -> None:
        rollout = config(engine={"stall_timeout_s": 1e6})
        with slow_engines(
            monkeypatch, RolloutConfig(**rollout), tokens_per_s=SPEED, lengths=lambda _: LONG
        ) as (serve, client):
            buffer, loop = BufferConfig(poll_timeout_s=5.0), asyncio.get_running_loop()
            async with running(client, rollout=rollout, buffer=buffer, limit_s=20_000) as run:
                step = asyncio.create_task(run.step(0))
                await asyncio.sleep(1_000.0)
                assert not step.done(), "tokens move"
                serve.replicas[0].llm.is_hung, hung_at = True, loop.time()
                starved = (
                    r"nothing has moved for 300 s \(buffer.wait_timeout_s\): last token 3\d\d s"
                )
                with pytest.raises(StarvedError, match=starved):
                    await step
                assert loop.time() - hung_at < 320.0
                serve.replicas[0].llm.is_hung = False
            await check_ledger(run)

    run_in_virtual_time(monkeypatch, work)


def test_a_run_whose_only_engine_stalled_and_does_not_come_again_ends_with_that(monkeypatch):
    async def work() -> None:
        rollout = config(engine={"stall_timeout_s": 100.0, "start_timeout_s": 500.0})
        with slow_engines(
            monkeypatch, RolloutConfig(**rollout), tokens_per_s=SPEED, lengths=lambda _: LONG
        ) as (serve, client):
            async with running(
                client, rollout=rollout, buffer=BufferConfig(), limit_s=20_000
            ) as run:
                await asyncio.sleep(200.0)
                serve.replicas[0].llm.is_hung = True
                with pytest.raises(
                    EngineUnavailableError,
                    match=r"made no token for 100 s.*no rollout server .* within 500 s",
                ):
                    await run.step(0)
            assert await check_ledger(run) >= 8 * 190 * SPEED, "all that had come out is kept"

    run_in_virtual_time(monkeypatch, work)
