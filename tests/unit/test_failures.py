"""Failures count by cause, engines that are gone are told once, and what has stalled is known
(rollout/failures.py, data/movement.py, serve/vllm/stall.py, serve/vllm/stats.py)."""

from __future__ import annotations

import asyncio
import logging
import traceback
from types import SimpleNamespace

from ray_apr.core.exceptions import (
    EngineDiedError,
    EngineUnavailableError,
    RewardError,
    RolloutError,
    one_line,
)
from ray_apr.data.movement import Movement, Moves
from ray_apr.rollout.failures import FailureCount, Outage, cause_of, told
from ray_apr.serve.vllm.stall import StallWatch
from ray_apr.serve.vllm.stats import EngineLoad
from tests.fakes import FakeClock
from tests.virtual_time import run_in_virtual_time


def test_what_fails_of_one_cause_while_it_was_under_way_together_counts_once():
    """32 samples of one broken judge were 32 failures, which ended the run."""
    count = FailureCount("rewards")
    began = count.now
    assert [count.failed("no judge", began) for _ in range(32)] == [1] * 32
    assert count.failed("no judge", count.now) == 2, "it was tried again since"
    assert count.failed("no judge", began) == 2, "one that began before comes late"
    assert count.failed("bad prompt", began) == 3, "another cause"
    count.succeeded()
    assert count.failed("no judge", count.now) == 1


def test_a_cause_is_the_same_for_every_sample():
    errors = [RewardError(f"e0-{i}-0", "raised", "ConnectError: judge is down") for i in range(2)]
    assert cause_of(errors[0], "e0-0-0") == cause_of(errors[1], "e0-1-0")
    calls = [RolloutError(f"vLLM refused request e0-{i}-1#{i}: no such token") for i in range(2)]
    assert cause_of(calls[0], "e0-0-1") == cause_of(calls[1], "e0-1-1")
    assert cause_of(calls[0], "e0-0-1") != cause_of(RolloutError("another"), "e0-0-1")


def test_what_is_told_of_a_failure_is_one_short_line_that_names_the_sample():
    reward = RewardError("e0-4-5", "raised", "ValueError: cannot score\n'so\n many'")
    assert told(reward, "e0-4-5") == (
        "reward of sample e0-4-5 raised: ValueError: cannot score 'so many'"
    )
    assert told(RolloutError("no such token"), "e0-4-5") == (
        "sample e0-4-5: RolloutError: no such token"
    )
    long = told(RewardError("e0-4-5", "raised", "x" * 9999), "e0-4-5")
    assert len(long) == 500 and long.endswith("x…")


def test_an_engine_that_is_gone_is_told_once_and_once_when_its_samples_go_on(caplog):
    clock = FakeClock()
    outage = Outage(clock)
    caplog.set_level(logging.WARNING)
    for _ in range(3):
        for sample in ("a", "b", "c"):
            outage.failed(sample, EngineUnavailableError("engine-0 is dead"))
        clock.advance(1.0)
    assert outage.reason == "engine-0 is dead"
    for sample in ("a", "b", "c", "d"):
        outage.ended(sample)
    assert [record.message for record in caplog.records] == [
        "samples wait for an engine: engine-0 is dead",
        "3 samples have an engine again after 3 s and 9 tries",
    ]
    assert not outage.reason


def test_each_kind_of_progress_begins_the_wait_anew():
    clock = FakeClock(100.0)
    movement = Movement(clock)
    assert not movement.has_begun and movement.quiet_s() == 0.0
    for moves in (Moves(), Moves(tokens=1), Moves(tokens=1, rewards=1), Moves(engines=1)):
        movement.report(moves)
        assert movement.quiet_s() == 0.0
        clock.advance(10.0)
        movement.report(moves)
        assert movement.quiet_s() == 10.0
    assert movement.report_age_s == 0.0


def test_an_engine_has_stalled_after_its_limit_but_for_pauses_and_without_requests(monkeypatch):
    async def work() -> None:
        loop = asyncio.get_running_loop()
        watch = StallWatch(10.0)
        stalled = asyncio.create_task(watch.until_stalled())
        await asyncio.sleep(100.0)
        assert not stalled.done(), "it has nothing to do"
        watch.set_running(2)
        await asyncio.sleep(8.0)
        watch.set_paused(True)
        await asyncio.sleep(100.0)
        watch.set_paused(False)
        for _ in range(5):
            await asyncio.sleep(9.0)
            watch.set_running(3)
            watch.move()
        began = loop.time()
        await stalled
        assert loop.time() - began == 10.0 and watch.is_stalled
        watch.set_running(0)
        watch.set_running(1)
        assert watch.is_stalled, "that its requests were taken away is no progress"
        watch.move()
        assert not watch.is_stalled

    run_in_virtual_time(monkeypatch, work)


def test_tokens_and_prefills_are_progress_and_steps_without_either_are_none():
    moved = []
    load = EngineLoad(lambda: moved.append(load.num_tokens))

    def step(tokens: int, kv_usage: float) -> None:
        stats = SimpleNamespace(num_generation_tokens=tokens, num_preempted_reqs=0)
        load.take(SimpleNamespace(num_waiting_reqs=1, kv_cache_usage=kv_usage), stats)

    step(0, 0.25)
    step(0, 0.5)
    step(0, 0.5)
    step(3, 0.5)
    load.take(None, None)
    assert moved == [0, 0, 3]


def test_an_error_is_told_in_one_line():
    assert one_line(RolloutError("the engine\nis gone")) == "the engine is gone"
    assert one_line(RuntimeError("The actor died.\n\tclass_name: X")) == "The actor died."
    assert one_line(KeyError()) == "KeyError()"
    text = "Traceback (most recent call last):\n  File ...\n\nValueError: no row"
    assert one_line(RuntimeError(text)) == "ValueError: no row"
    several = (
        f"{text}\n\nDuring handling:\n{text[:35]}\n  File ...\nx.BadError: 1 fault\n  a = b\nsee c"
    )
    assert one_line(RuntimeError(several)) == "x.BadError: 1 fault a = b see c"
    unnamed = f'{text}\n\nDuring handling:\n{text[:35]}\n  File "a.py"\n    odd()\nOdd: 1'
    assert one_line(RuntimeError(unnamed)) == "Odd: 1"
    cannot = RolloutError(f"it cannot start: 3 tries.\n{text}")
    assert one_line(cannot) == "it cannot start: 3 tries. … ValueError: no row"
    of_serve = RolloutError(f"it cannot start: 2 times.\nServeReplica()\nRuntimeError: {text}")
    assert one_line(of_serve) == "it cannot start: 2 times. … ValueError: no row"


def test_of_a_group_of_errors_the_last_one_is_told():
    """known fault: the line that Python draws below it was."""
    try:
        raise ExceptionGroup("two failed", [KeyError("a"), ValueError("no row")])
    except ExceptionGroup:
        text = traceback.format_exc()
    for error in (RuntimeError(text), RuntimeError(f"ray::run()\n{text}")):
        assert one_line(error) == "ValueError: no row"
    assert one_line(RolloutError(f"it died:\n{text}")) == "it died: … ValueError: no row"


def test_an_engine_that_died_of_an_error_of_rays_says_it_in_few_words():
    """known fault: its line had the whole traceback of the engine's worker."""
    frame = '  File "/vllm/worker.py", line 1, in execute\n    run()\n'
    task = f"ray::Worker.execute() (pid=1)\n{20 * frame}torch.OutOfMemoryError: 2 GiB.\nsee a"
    died = EngineDiedError(f"engine-0 is dead: RayTaskError(RuntimeError): {task}")
    begin = "engine-0 is dead: RayTaskError(RuntimeError): ray::Worker.execute() (pid=1)"
    assert one_line(died) == f"{begin} … torch.OutOfMemoryError: 2 GiB. see a"


def test_an_error_that_quotes_a_traceback_is_told_once():
    """known fault: the line came twice."""
    said = RewardError("e0-1", "invalid", repr("Traceback (most recent call last):\n  File ..."))
    assert one_line(said) == str(said)
