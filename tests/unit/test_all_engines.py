"""A run outlives the death of all its engines at one moment (rollout/engines.py, syncs.py)."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from ray_apr.core.exceptions import (
    APRError,
    EngineUnavailableError,
    NoEngineError,
    RolloutError,
)
from ray_apr.core.metrics import Metrics
from ray_apr.data.store import opened
from ray_apr.rollout import engines as engines_module
from ray_apr.rollout import syncs as syncs_module
from ray_apr.rollout import worker as worker_module
from ray_apr.rollout.engines import EngineWatch
from ray_apr.scheduling.orders import Order
from ray_apr.serve.errors import of_living
from ray_apr.train import answers as answers_module
from ray_apr.train.control import RunControl
from tests.fakes import MortalEngines, ScriptedEngine
from tests.rollout_run import Handle, Recorder, running, until, without_ray

LONG = 1500
"""Tokens of a response that does not end before its engine is killed."""
NONE = NoEngineError("status: no rollout server runs")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    without_ray(monkeypatch)
    monkeypatch.setattr(worker_module, "_HEARTBEAT_S", 0.02)


def kill_all(engines: MortalEngines) -> None:
    for engine in tuple(engines.living):
        engines.kill(engine)


async def batch_of(run, step, last_step, told=()):
    """Take the batch of a granted step as a trainer does that sends its weights when it is told
    to; returns its samples, and what it was told."""
    while True:
        ticket = await run.buffer.take(0, last_step, told)
        if ticket is None:
            continue
        if ticket.order is None:
            await run.buffer.ack(step)
            return [sample for group in opened(ticket.refs) for sample in group], told
        told += (ticket.order,)
        await run.worker.weight_group_state()
        await run.sync(ticket.order.lost_version)


@pytest.mark.parametrize("num_engines", [1, 2])
@pytest.mark.parametrize("is_sync", [False, True])
async def test_engines_that_all_die_get_the_weights_again_and_keep_the_tokens_of_before(
    num_engines, is_sync
):
    """The trainer waited for a batch, and the engines for weights, until the run ended."""
    engines = MortalEngines(num_engines, default_length=LONG, restart_s=0.2, forgets=True)
    settings = {"max_staleness": 0} if is_sync else {"max_staleness": 2}
    sizes = {"num_replicas": num_engines, "max_response_tokens": LONG}
    async with running(engines, rollout=sizes, oversampling_factor=1.0, **settings) as run:
        await run.step(0)
        await run.sync(1)
        told: tuple[Order, ...] = ()
        for step in (1, 2):
            await until(lambda: len(engines.running) == 4)
            kill_all(engines)
            await run.buffer.grant(step, step)
            samples, told = await batch_of(run, step, step - 1, told)
            assert len(samples) == 4
            await run.sync(step + 1)
        assert [order.lost_version for order in told] == [1, 2], "each time, once"
    assert engines.num_lost >= 8, "calls that ran"
    await run.check_ledger(run.summary)


async def test_what_engines_said_before_a_sync_does_not_have_their_weights_sent_again():
    """Known fault: while the recorder was slow a sync ended, and the version of its weights was
    looked for in what the engines had said before."""
    sizes = {"max_response_tokens": LONG}
    engines = MortalEngines(1, default_length=LONG)
    async with running(engines, rollout=sizes, max_staleness=1) as run:
        record, has_begun, may_end = run.recorder.record, asyncio.Event(), asyncio.Event()

        async def slow(kind, row):
            has_begun.set()
            await may_end.wait()
            await record(kind, row)

        run.recorder.record = slow
        await has_begun.wait()
        await run.worker.weight_group_state()
        await run.sync(1)
        await run.buffer.grant(1, 1)
        may_end.set()
        await asyncio.sleep(0.1)
        assert not run.worker._is_asked


async def test_a_run_whose_engines_do_not_come_again_ends_with_the_reason():
    engines = MortalEngines(2, default_length=LONG, restart_s=60.0)
    sizes = {"num_replicas": 2, "max_response_tokens": LONG, "engine": {"start_timeout_s": 0.4}}
    async with running(engines, rollout=sizes, max_staleness=1) as run:
        await until(lambda: len(engines.running) >= 4)
        kill_all(engines)
        await asyncio.sleep(0.1)
        assert await run.buffer.failure() is None
        with pytest.raises(NoEngineError, match=r"is dead; then .*within 0\.4 s.*start_timeout_s"):
            await run.step(0)
        with pytest.raises(NoEngineError, match=r"within 0\.4 s"):
            await run.worker.weight_group_state()


async def test_a_sync_that_finds_no_engine_is_asked_again_until_one_runs(monkeypatch):
    monkeypatch.setattr(engines_module, "_ANY_S", 0.05)
    engines = MortalEngines(1, restart_s=0.2)
    async with running(engines, max_staleness=1) as run:
        await run.step(0)
        kill_all(engines)
        assert await run.worker.weight_group_state() is None
        while (state := await run.worker.weight_group_state()) is None:
            pass
        assert state.num_workers == 1


async def test_a_worker_that_begins_where_no_engine_runs_takes_nothing_over():
    engines = MortalEngines(1)
    kill_all(engines)
    watch = watch_of()
    assert await watch.take_over(engines, {"engine-0": 7}) == 0


@pytest.mark.parametrize("verb", ["abort", "status"])
async def test_a_worker_that_begins_waits_for_engines_that_do_not_answer(monkeypatch, verb):
    """known fault: one that hung, or whose connection broke, ended the run."""
    monkeypatch.setattr(engines_module, "_END_PAUSE_S", 0.001)
    monkeypatch.setattr(engines_module, "_END_TRIES", 3)
    engines = MortalEngines(2)
    engines.tokens_generated = 9
    answer, errors = getattr(engines, verb), [EngineUnavailableError("connection reset")] * 7

    async def late(*args, **kwargs):
        if errors:
            raise errors.pop()
        return await answer(*args, **kwargs)

    monkeypatch.setattr(engines, verb, late)
    watch = watch_of()
    assert await watch.take_over(engines, {"engine-0": 7, "engine-9": 5}) == 2
    assert watch.received == {"engine-0": 9}
    monkeypatch.setattr(engines_module, "_TAKE_OVER_S", 0.0)
    errors += [RolloutError("no answer within the time limit")] * 100
    with pytest.raises(RolloutError, match="no answer"):
        await watch_of().take_over(engines, {})


def watch_of(**given):
    limits = SimpleNamespace(max_inflight=8, is_starved=False)
    return EngineWatch(limits, Handle(Recorder()), Metrics("a-run"), is_adaptive=False, **given)


def test_servers_that_start_are_not_said_to_have_ended():
    """known fault: `GET /healthz` of a run that starts said "their logs say why they ended"."""
    with pytest.raises(
        NoEngineError, match="no rollout server runs: they start, or their logs say"
    ):
        of_living([], "status")


async def test_colocated_engines_have_no_time_to_come_again():
    with pytest.raises(NoEngineError, match="no rollout server runs"):
        watch_of(start_limit_s=0.0).check_any(NONE)


async def test_engines_that_are_all_gone_again_and_again_without_a_step_end_the_run():
    watch, engines = watch_of(start_limit_s=60.0), MortalEngines(1, restart_s=0.0)
    with pytest.raises(NoEngineError, match="for the 11th time without a step between"):
        for number in range(1, 99):
            kill_all(engines)
            await watch.read(engines)
            await asyncio.sleep(0.005)
            await watch.read(engines)
            if number == 5:
                watch.on_version()
    assert number == 16


async def test_engines_whose_nodes_are_all_drained_are_one_outage_until_another_comes():
    watch, engine = watch_of(start_limit_s=60.0), ScriptedEngine(num_replicas=2)
    engine.leaving = {"engine-0"}
    await watch.read(engine)
    await asyncio.wait_for(watch.wait_for_any(), 0.1)
    engine.leaving = {"engine-0", "engine-1"}
    for _ in range(20):
        assert await watch.read(engine) == {"engine-0", "engine-1"}, "their figures are told"
    assert (watch._num_outages, watch.lack(0)) == (1, False)
    engine.leaving = {"engine-0"}
    await watch.read(engine)
    await asyncio.wait_for(watch.wait_for_any(), 0.1)
    assert watch.lack(1), "only those that stay are asked for"


@pytest.mark.parametrize(
    ("version", "is_paused", "lacks"), [(3, False, True), (4, False, False), (3, True, False)]
)
async def test_engines_lack_a_version_unless_one_has_it_or_is_in_a_sync(version, is_paused, lacks):
    watch, engine = watch_of(), ScriptedEngine(policy_version=version, num_replicas=2)
    assert not watch.lack(4), "nothing is known"
    engine.is_paused = is_paused
    await watch.read(engine)
    assert watch.lack(4) == lacks


# -- the trainer's side ----------------------------------------------------------------------


@pytest.mark.parametrize("has_failed", [False, True])
def test_rank_0_asks_again_who_is_there_unless_the_run_has_failed(monkeypatch, has_failed):
    answers = [None, None, SimpleNamespace(is_whole=True)]
    worker = SimpleNamespace(ask=lambda verb, **_: answers.pop(0))
    failure = RolloutError("no judge") if has_failed else None
    monkeypatch.setattr(answers_module, "failure_of", lambda buffer: failure)
    control = RunControl(buffer=None, worker=worker, recorder=None, sync_timeout_s=5.0)
    if has_failed:
        with pytest.raises(RolloutError, match="no judge"):
            control.is_group_whole()
    else:
        assert control.is_group_whole() and not answers


@pytest.mark.parametrize("ends", ["engines run", "run has failed", "time is over"])
def test_rank_0_waits_for_engines_that_share_its_gpu(monkeypatch, ends):
    answers = [False, False, ends == "engines run"]
    worker = SimpleNamespace(ask=lambda verb, **_: answers.pop(0))
    failures = [None, RolloutError("no model") if ends == "run has failed" else None, None]
    monkeypatch.setattr(answers_module, "failure_of", lambda buffer: failures.pop(0))
    clock = iter(range(0, 9, 2))
    monkeypatch.setattr(answers_module.time, "monotonic", lambda: next(clock))
    control = RunControl(
        buffer=None, worker=worker, recorder=None, sync_timeout_s=5.0, start_timeout_s=5.0
    )
    if ends == "engines run":
        control.wait_for_engines()
        assert not answers
    else:
        of = {"run has failed": "no model", "time is over": "waited 5 s for the engines to start"}
        with pytest.raises(APRError, match=of[ends]):
            control.wait_for_engines()


async def test_a_worker_says_when_its_engines_run(monkeypatch):
    monkeypatch.setattr(syncs_module, "_LOOK_S", 0.01)
    syncs = object.__new__(syncs_module.WeightSyncs)
    syncs._engines_run = asyncio.Event()
    assert not await syncs.engines_run()
    monkeypatch.setattr(syncs_module, "_LOOK_S", 20.0)
    asked = asyncio.create_task(syncs.engines_run())
    await asyncio.sleep(0)
    syncs._engines_run.set()
    assert await asked
