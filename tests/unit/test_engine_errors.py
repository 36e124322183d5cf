"""What an engine makes of errors and silences of vLLM's core (serve/vllm/core.py)."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from types import SimpleNamespace

import pytest

from ray_apr.core.exceptions import (
    SYNC_BROKEN,
    EngineDiedError,
    EngineUnavailableError,
    SyncBrokenError,
    WeightSyncError,
)
from ray_apr.core.messages import WeightGroup
from ray_apr.serve.spec import EngineSpec
from ray_apr.serve.vllm import core as core_module
from ray_apr.serve.vllm import engine as engine_module
from ray_apr.serve.vllm import plugin
from ray_apr.serve.vllm.calls import Call
from ray_apr.serve.vllm.engine import VLLMEngine
from tests.fakes import generate_request


class _Dead(Exception):
    """Stands for vLLM's."""


class Core:
    """A vLLM whose verbs raise, or never answer."""

    errored = False
    dead_error = _Dead("the core is dead")

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.is_hung = False
        self.engine_core = self
        self.aborted: list[str] = []
        self.output_handler = asyncio.ensure_future(asyncio.Event().wait())

    async def _answer(self, *_, **__) -> None:
        if self.is_hung:
            await asyncio.Event().wait()
        if self.error is not None:
            raise self.error

    init_weight_transfer_engine = start_weight_update = update_weights = _answer
    finish_weight_update = pause_scheduler_async = resume_generation = wake_up = _answer

    async def abort(self, ids) -> None:
        if self.error is not None:
            raise self.error
        self.aborted.extend(ids)


@pytest.fixture
async def engine(monkeypatch):
    requests = ("WeightTransferInitRequest", "WeightTransferUpdateRequest")
    private = SimpleNamespace(**{name: lambda *_, **__: None for name in requests})
    monkeypatch.setitem(sys.modules, "ray_apr.serve.vllm.private", private)
    monkeypatch.setattr(core_module.Core, "dead_error", _Dead)
    engine = VLLMEngine(EngineSpec(model="none", device="cpu", stall_timeout_s=0.01), "engine-0")
    engine._core.llm = Core()
    engine._activity.start()
    yield engine
    engine._core.llm.output_handler.cancel()
    if engine._stall_task is not None:
        engine._stall_task.cancel()


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (f"Call failed: {SYNC_BROKEN}: rank 1 of 2 could not join", SyncBrokenError),
        (f"Worker failed with error '{SYNC_BROKEN} at version 3: reset'", SyncBrokenError),
        ("no train worker shares GPU-1 with this engine worker", WeightSyncError),
        ("3 parameters got no weights: a, b, c", WeightSyncError),
        ("collective backend APR_NCCL is not available here", WeightSyncError),
    ],
)
async def test_only_what_another_try_may_mend_is_a_broken_sync(engine, said, expected):
    """known fault: weights that do not fit were sent four times."""
    engine._core.llm.error = Exception(said)  # as vLLM hands on its workers' errors
    engine._calls.gate.clear()
    with pytest.raises(WeightSyncError, match="engine-0") as joined:
        await engine.join_weight_group(WeightGroup(timeout_s=5.0, endpoint=b""), 1)
    with pytest.raises(WeightSyncError, match="engine-0") as received:
        await engine.receive_weights(3)
    assert type(joined.value) is type(received.value) is expected


async def test_a_core_that_dies_says_why(engine, monkeypatch):
    """known fault: an engine was dead for a root cause that was to be found in some log."""
    monkeypatch.setattr(plugin.multiprocessing, "parent_process", lambda: "the server")
    before = list(logging.getLogger("vllm").handlers)
    first = engine._core._first_error = plugin.FirstError()
    try:
        with first.of_processes():  # as in the core's process
            plugin._keep_first_error()
        assert plugin._ERROR_FILE not in os.environ
        engine._core.llm.error = _Dead("see the stack trace above")
        with pytest.raises(EngineDiedError, match="engine-0 is dead: see the stack trace above"):
            await engine.resume()
        for said in ("no such head", "a later one"):
            logging.getLogger("vllm.core").error("fatal", exc_info=RuntimeError(said))
        with pytest.raises(EngineDiedError, match=r"is dead: RuntimeError: no such head$"):
            await engine.resume()
        monkeypatch.setattr(plugin, "_END_TAKES_S", -1.0)
        with pytest.raises(EngineDiedError, match="is dead: see the stack trace above"):
            await engine.resume()  # that was long ago, and another error takes its place
        told = (RuntimeError, RuntimeError("the \udcfc"), None)  # as of a file of any name
        record = logging.LogRecord("vllm.core", logging.ERROR, "", 0, "fatal", (), told)
        logging.getLogger("vllm").handlers[-1].handle(record)  # no report of a test may have it
        monkeypatch.setattr(plugin, "_END_TAKES_S", 60.0)
        with pytest.raises(EngineDiedError, match=r"is dead: RuntimeError: the \\udcfc$"):
            await engine.resume()
    finally:
        logging.getLogger("vllm").handlers[:] = before
        first.close()
        engine._core._first_error = None


async def test_a_sync_that_finds_an_engine_resumed_is_tried_again(engine):
    """known fault: who resumed one over HTTP just then ended the run."""
    await engine.pause("abort")
    await engine.resume()
    with pytest.raises(SyncBrokenError, match="engine-0 must be paused"):
        await engine.receive_weights(3)


async def test_the_watch_for_stalls_outlives_an_error(engine, caplog):
    """known fault: an unexpected error ended it without a word."""
    engine._calls.inside["s#0"] = None
    engine._count_inside(1)
    engine._core.llm.error = ValueError("a bug")
    engine._watch()
    await asyncio.sleep(0.05)
    assert "calls that stalled are not ended" in caplog.text and "a bug" in caplog.text
    engine._core.llm.error = None
    await asyncio.sleep(0.05)
    assert "s#0" in engine._core.llm.aborted


async def test_an_engine_that_waits_for_a_weight_group_has_not_stalled(engine):
    """known fault: where a member did not come, all others were replaced that had requests."""
    engine._calls.inside["s#0"] = None
    engine._count_inside(1)
    engine._core.llm.is_hung = True  # as long as it waits
    engine._watch()
    for limit_s, has_stalled in ((60.0, False), (0.02, True)):
        group = WeightGroup(timeout_s=limit_s, endpoint=b"")
        joining = asyncio.create_task(engine.join_weight_group(group, 1))
        await asyncio.sleep(0.1)
        assert engine.status().is_stalled is has_stalled
        joining.cancel()
        await asyncio.wait([joining])
        await asyncio.sleep(0)
        engine._stall.move()


async def test_who_asks_for_the_health_of_a_dead_core_needs_no_vllm_to_hear_of_it(engine):
    """known fault: Serve's controller imported vLLM to read its error, and stood for 8 s."""
    await engine.check_health()
    engine._core.llm.errored = True
    with pytest.raises(EngineDiedError, match="the core is dead"):
        await engine.check_health()


@pytest.mark.parametrize("verb", ["pause", "resume", "wake"])
async def test_a_core_that_hangs_without_dying_counts_as_dead(engine, monkeypatch, verb):
    """known fault: the pause waited without end, and everything else behind it."""
    monkeypatch.setattr(engine_module, "ANSWER_LIMIT_S", 0.05)
    hung = pytest.raises(EngineDiedError, match="did not answer")
    if verb != "pause":
        await engine.pause("abort")
        engine._weights.are_away = verb == "wake"
    engine._core.llm.is_hung = True
    asked = asyncio.create_task(engine.pause("abort") if verb == "pause" else engine.resume())
    await asyncio.sleep(0)
    behind = asyncio.create_task(engine.resume())
    call = engine._calls.inside["s#0"] = Call()
    call.entered.set()
    async with asyncio.timeout(5):
        for call in (asked, behind):
            with hung:
                await call
        assert engine._core.llm.aborted == ["s#0"], "it ends with what has left the core"
        assert not engine.is_paused, "nobody waits at the gate"
        for call in (engine.pause("abort"), engine.receive_weights(3), engine.check_health()):
            with hung:
                await call
        with hung:
            engine.status()
        with pytest.raises(EngineUnavailableError, match="did not answer") as refused:
            await engine.generate(
                generate_request(
                    request_id="s#1",
                    token_ids=[1],
                    sampling=SimpleNamespace(origin=None),
                    max_tokens=1,
                )
            )
        assert not isinstance(refused.value, EngineDiedError), "it did not run there"


async def test_a_core_that_takes_part_in_a_sync_has_its_time(engine, monkeypatch):
    monkeypatch.setattr(engine_module, "ANSWER_LIMIT_S", 0.02)
    engine._core.llm.is_hung = True  # the workers wait for the others
    group = WeightGroup(timeout_s=60.0, endpoint=b"")
    joining = asyncio.create_task(engine.join_weight_group(group, 1))
    await asyncio.sleep(0)
    pausing = asyncio.create_task(engine.pause("abort"))
    await asyncio.sleep(0.1)
    assert not pausing.done()
    for task in (joining, pausing):
        task.cancel()
