"""The scripted engine behaves as the rollout client's contract says (tests/fakes.py)."""

from __future__ import annotations

import asyncio

import pytest

from ray_apr.core.exceptions import EngineUnavailableError, RolloutError
from ray_apr.core.messages import SamplingParams
from ray_apr.core.sample import FinishReason
from tests.fakes import FakeClock, ScriptedEngine, generate_request


def call(engine, sample, *, ids=(1, 2), call_number=0, budget=8):
    return asyncio.ensure_future(
        engine.generate(
            generate_request(
                request_id=f"{sample}#{call_number}",
                session_id="g",
                token_ids=ids,
                sampling=SamplingParams(),
                max_tokens=budget,
            )
        )
    )


async def settle():
    for _ in range(5):
        await asyncio.sleep(0)


async def test_scripted_lengths_and_versions_over_a_sync():
    engine = ScriptedEngine({"a": 5})
    task = call(engine, "a")
    await settle()
    engine.advance(2)
    await engine.pause("keep")
    engine.advance(3)  # frozen
    await engine.receive_weights(1)
    await engine.resume()
    engine.advance(9)
    made = await task
    assert [(s.policy_version, len(s.token_ids)) for s in made.segments] == [(0, 2), (1, 3)]
    assert made.finish_reason is FinishReason.STOP and made.num_tokens == 5


async def test_abort_delivers_the_tokens_so_far_and_a_resume_goes_on():
    engine = ScriptedEngine({"a": 5})
    first = call(engine, "a")
    await settle()
    assert await engine.abort(["a#0", "unknown"]) == 1
    made = await first
    assert made.finish_reason is FinishReason.ABORT and made.num_tokens == 0
    second = call(engine, "a", call_number=1)
    await settle()
    engine.advance(3)
    await engine.pause("abort")
    ids = (await second).segments[0].token_ids
    await engine.resume()
    third = call(engine, "a", ids=(1, 2, *ids), call_number=2)
    await settle()
    engine.advance(9)
    assert (await third).segments[0].token_ids == (1003, 1004)
    with pytest.raises(RolloutError, match="was generated"):
        await call(engine, "a", ids=(1, 2, 9), call_number=3)


async def test_budget_ends_with_length():
    engine = ScriptedEngine(default_length=9, auto=2)
    made = await call(engine, "a", budget=3)
    assert made.finish_reason is FinishReason.LENGTH and made.num_tokens == 3


async def test_automatic_engine_waits_while_it_is_paused():
    engine = ScriptedEngine(auto=1)
    await engine.pause("keep")
    task = call(engine, "a")
    await settle()
    assert not task.done() and (await engine.status())[0].num_running == 1
    await engine.resume()
    assert (await task).num_tokens == 4


async def test_scripted_failures():
    engine = ScriptedEngine(auto=1)
    engine.fail["a"] = [RolloutError("boom")]
    with pytest.raises(RolloutError, match="boom"):
        await call(engine, "a")
    assert (await call(engine, "a")).num_tokens == 4
    engine.fail_next_sync = RuntimeError("lost")
    with pytest.raises(RuntimeError, match="lost"):
        await engine.receive_weights(1)
    with pytest.raises(EngineUnavailableError):
        await call(engine, "b")
    await engine.receive_weights(1)
    status = (await engine.status())[0]
    assert (status.policy_version, status.weights_valid, status.tokens_generated) == (1, True, 4)


def test_fake_clock_moves_when_told():
    clock = FakeClock(3.0)
    clock.advance(1.5)
    assert clock() == 4.5
