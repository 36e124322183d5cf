"""The gate of a run's steps (train/gate.py); the loop behind it is in test_train_loop.py."""

from __future__ import annotations

import asyncio
import types

from ray_apr.train import gate as gate_module
from ray_apr.train.gate import GateClient, StepGate

LIMIT_S = 0.02


async def test_ranks_follow_the_same_orders_each_at_its_own_pace():
    gate = StepGate(2)
    assert await gate.orders_from(0, 0, LIMIT_S) == [], "the limit of a call"
    waiting = asyncio.create_task(gate.orders_from(0, 0, 30.0))
    await asyncio.sleep(0)
    assert await gate.order([None, "saved"]) == 2
    assert await asyncio.wait_for(waiting, 5.0) == [None, "saved"]
    assert await gate.orders_from(0, 1, 30.0) == ["saved"]
    assert await gate.orders_from(1, 0, 30.0) == [None, "saved"]


async def test_an_order_is_done_when_every_rank_asks_for_the_next_one():
    gate = StepGate(2)
    await gate.order([None])
    assert await gate.news(0, 0, LIMIT_S) == ([], False), "no rank is there yet"
    await gate.orders_from(0, 0, LIMIT_S)
    await gate.orders_from(0, 1, LIMIT_S)
    assert await gate.news(0, 1, LIMIT_S) == ([], False)
    waiting = asyncio.create_task(gate.news(0, 1, 30.0))
    await asyncio.sleep(0)
    await gate.orders_from(1, 0, LIMIT_S)
    assert not waiting.done()
    await gate.orders_from(1, 1, LIMIT_S)
    assert await asyncio.wait_for(waiting, 5.0) == ([], True)


async def test_lines_come_out_once_and_in_order():
    gate = StepGate(1)
    waiting = asyncio.create_task(gate.news(0, None, 30.0))
    await asyncio.sleep(0)
    await gate.say("step 1")
    assert await asyncio.wait_for(waiting, 5.0) == (["step 1"], False)
    await gate.say("step 2")
    assert await gate.news(1, None, 30.0) == (["step 2"], False)
    assert await gate.news(2, None, 0.0) == ([], False)


def test_a_rank_asks_again_however_long_no_order_comes(monkeypatch):
    asked, answers = [], [[], [], [], [None, "saved"], ["saved"]]
    handle = types.SimpleNamespace(
        orders_from=types.SimpleNamespace(remote=lambda *args: asked.append(args))
    )
    monkeypatch.setattr(gate_module, "answer_of", lambda ref, whom, timeout_s: answers.pop(0))
    client = GateClient(handle, rank=3)
    assert client.next() is None
    assert client.next() == "saved"
    assert [args[:2] for args in asked] == [(3, 0)] * 4 + [(3, 1)]
