"""Calls of a reward worker travel together, and none waits for another (rollout/calls.py)."""

from __future__ import annotations

import asyncio
import threading

import pytest
from ray.exceptions import RayActorError

from ray_apr.core.exceptions import RewardError
from ray_apr.core.sample import Prompt, Sample
from ray_apr.core.user import RewardResult, Step
from ray_apr.rollout.calls import Calls, Outcomes
from tests.fakes import unless_dead


def sample(number, row=None):
    prompt = Prompt(prompt_id="g0", token_ids=(1,), row=row or {})
    return Sample(sample_id=f"g0-{number}", group_id="g0", prompt=prompt, max_response_tokens=4)


class Worker:
    """`.exchange.remote` as an actor has it, without Ray; dead or silent when told so."""

    def __init__(self, answer):
        self.outcomes = Outcomes(answer)
        self.exchange = self
        self.sizes = []
        self.dies = asyncio.Event()

    async def remote(self, requests):
        self.sizes.append(len(requests))
        return await unless_dead(self.outcomes.exchange(requests), self.dies)


async def by_number(what, sample, limit_s):
    assert (what, limit_s) == ("score", 5.0)
    return RewardResult(reward=float(sample.sample_id.partition("-")[2]))


async def make(calls, *numbers):
    made = (calls.make("score", sample(n), 5.0) for n in numbers)
    return await asyncio.gather(*made, return_exceptions=True)


async def test_calls_of_a_moment_and_their_outcomes_travel_together():
    worker = Worker(by_number)
    calls = Calls(worker)
    for size in (50, 1, 7):
        found = await make(calls, *range(size))
        assert [result.reward for result in found] == list(range(size))
        assert calls.load == 0
    assert worker.sizes == [50, 1, 7], "one exchange each"


async def test_a_slow_call_holds_up_neither_those_it_began_with_nor_later_ones():
    slow = asyncio.Event()

    async def answer(what, sample, limit_s):
        if sample.sample_id == "g0-0":
            await slow.wait()
        return await by_number(what, sample, limit_s)

    worker = Worker(answer)
    calls = Calls(worker)
    first = asyncio.create_task(make(calls, 0))
    for _ in range(3):
        assert len(await make(calls, *range(1, 9))) == 8
        assert calls.load == 1
    slow.set()
    (result,) = await first
    assert result.reward == 0.0 and calls.load == 0
    await asyncio.sleep(0.01)
    assert not calls._tasks and not calls._num_owed and not worker.outcomes._num_owed


async def begun_apart(calls, count, pause_s):
    """Calls that begin one after the other, a pause between them."""
    made = []
    for number in range(count):
        made.append(asyncio.create_task(make(calls, number)))
        await asyncio.sleep(pause_s)
    return made


async def test_slow_calls_that_begin_one_by_one_need_no_more_exchanges_than_calls():
    async def answer(what, sample, limit_s):
        await asyncio.sleep(0.05)
        return await by_number(what, sample, limit_s)

    worker = Worker(answer)
    calls = Calls(worker)
    made = await begun_apart(calls, 60, 0.002)
    assert [found.reward for (found,) in await asyncio.gather(*made)] == list(range(60))
    assert len(worker.sizes) <= 60 + 5
    assert not worker.outcomes._waiters


async def test_outcomes_of_a_moment_wake_one_exchange_alone():
    releases = [asyncio.Event(), asyncio.Event()]

    async def answer(what, sample, limit_s):
        await releases[int(sample.sample_id.partition("-")[2]) % 2].wait()
        return await by_number(what, sample, limit_s)

    worker = Worker(answer)
    calls = Calls(worker)
    made = []
    async with asyncio.timeout(10):
        for number in range(20):  # each in an exchange of its own
            made.append(asyncio.create_task(make(calls, number)))
            while len(worker.outcomes._waiters) <= number:  # noqa: ASYNC110
                await asyncio.sleep(0)
    releases[0].set()
    await asyncio.gather(*made[::2])
    assert len(worker.outcomes._waiters) == 19
    releases[1].set()
    assert [found.reward for (found,) in await asyncio.gather(*made)] == list(range(20))


async def test_a_call_whose_caller_has_gone_at_once_is_not_sent():
    worker = Worker(by_number)
    calls = Calls(worker)
    gone = asyncio.create_task(calls.make("score", sample(1), 5.0))
    await asyncio.sleep(0)
    assert calls._outbox
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    (found,) = await make(calls, 2)
    assert found.reward == 2.0 and worker.sizes == [1]


async def test_a_call_that_is_given_up_is_forgotten_when_its_outcome_comes():
    release = asyncio.Event()

    async def answer(what, sample, limit_s):
        await release.wait()
        return await by_number(what, sample, limit_s)

    calls = Calls(Worker(answer))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await make(calls, 1)
    assert calls.load == 0
    release.set()
    (result,) = await make(calls, 2)
    assert result.reward == 2.0 and not calls._num_owed


async def test_a_worker_that_dies_fails_all_that_it_had_at_once():
    worker = Worker(lambda *_: asyncio.Event().wait())
    calls = Calls(worker)
    made = asyncio.create_task(make(calls, 1, 2, 3))
    await asyncio.sleep(0.01)
    worker.dies.set()
    assert [type(error) for error in await made] == [RayActorError] * 3
    assert [type(error) for error in await make(calls, 4)] == [RayActorError]


class OfTheUser(RewardError):
    """Its module is not there in the caller's process."""


async def test_errors_and_answers_that_cannot_travel_cost_their_own_call_alone():
    async def answer(what, sample, limit_s):
        if sample.sample_id == "g0-1":
            raise OfTheUser(sample.sample_id, "invalid", "no digits")
        if sample.sample_id == "g0-2":
            return Step(text="a", state={"lock": threading.Lock()})
        if sample.sample_id == "g0-3":
            return Step(text="a", state={"odd": Unreadable()})
        assert sample.sample_id != "g0-4", "a bug of ours"
        return await by_number(what, sample, limit_s)

    good, own, locked, odd, bug = await make(Calls(Worker(answer)), 0, 1, 2, 3, 4)
    assert good.reward == 0.0
    assert type(own) is RewardError and own.args == ("g0-1", "invalid", "no digits")
    for error, says in ((locked, "cannot pickle"), (odd, "no module"), (bug, "of ours")):
        assert type(error) is RewardError and error.kind == "invalid"
        assert says in str(error)


def _raise():
    raise ModuleNotFoundError("no module")


class Unreadable:
    def __reduce__(self):
        return _raise, ()


async def test_a_sample_that_cannot_travel_is_its_callers_error():
    calls = Calls(Worker(by_number))
    bad = asyncio.create_task(calls.make("score", sample(1, {"lock": threading.Lock()}), 5.0))
    (good,) = await make(calls, 0)
    with pytest.raises(TypeError, match="pickle"):
        await bad
    assert good.reward == 0.0 and calls.load == 0
