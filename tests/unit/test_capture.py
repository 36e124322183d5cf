"""What a checkpoint takes of the rollout side, and how a new one goes on (rollout/capture.py)."""

from __future__ import annotations

import asyncio
import json
from collections import Counter

import pytest

from ray_apr.core.exceptions import ConfigError
from ray_apr.core.sample import FinishReason
from ray_apr.core.user import Step
from ray_apr.data.resumption import Begin, Counters, RolloutProgress
from ray_apr.data.saved_samples import groups_of
from ray_apr.rollout import sessions as sessions_module
from ray_apr.rollout import worker as worker_module
from ray_apr.run import actors
from ray_apr.scheduling.live import TurnRules
from ray_apr.scheduling.order import prompt_position
from tests.fakes import FIRST_TOKEN, ScriptedEngine
from tests.rollout_run import PROMPTS, Run, Scorer, running, until, without_ray

GROUPS = 24


@pytest.fixture(autouse=True)
def no_ray(monkeypatch):
    without_ray(monkeypatch)


async def take(run, before: Counters | None = None) -> Begin:
    """What a run goes on with that is killed now."""
    taken = await run.worker.capture()
    progress = RolloutProgress.of(
        taken.summary,
        taken.stats,
        seed=0,
        before=before or Counters(),
        state=taken.state,
        epoch=taken.epoch,
    )
    again = RolloutProgress.from_values(json.loads(progress.to_json()))
    assert again == progress
    return Begin(rollout=again, samples=taken.samples[0], before=again.counters)


def settings_of(begin: Begin) -> dict:
    """Of a worker that goes on."""
    return {
        "make_state": actors._state_maker(begin),
        "position": begin.rollout.position,
        "pending": begin.prompts_again,
    }


def check_closed(begin: Begin) -> None:
    """Each token is trained, discarded, or goes on."""
    counters = begin.before
    discarded = sum(counters.tokens_discarded.values())
    assert counters.tokens_generated == counters.tokens_trained + discarded + begin.num_kept


@pytest.mark.parametrize("delay", [0, 1, 4])
@pytest.mark.parametrize(
    "partial",
    [
        {"max_staleness": 4, "oversampling_factor": 3.0},
        {"max_staleness": 2, "oversampling_factor": 2.0, "interrupt": "batch_full"},
        {"max_staleness": 2, "oversampling_factor": 2.0, "on_stale": "wait"},
        {"max_staleness": 0, "oversampling_factor": 1.0, "interrupt": "never"},
    ],
)
async def test_a_run_that_is_killed_again_and_again_trains_each_prompt_once(partial, delay):
    """No token of a checkpoint is generated again, none is lost or counted twice."""
    lengths = {f"e{e}-{o}-{i}": 1 + (7 * e + 3 * o + i) % 9 for e in range(9) for o in range(3)
               for i in range(2)}  # fmt: skip
    begin, trained, step = Begin(rollout=None), Counter(), 0
    given: dict = {}
    while len(trained) < GROUPS:
        engine = ScriptedEngine(lengths, auto=1, policy_version=step)
        async with running(engine, policy_version=step, **given, **partial) as run:
            if given:
                await run.sync(step)
            for _ in range(3):
                trained.update({s.group_id for s in await run.step(step)})
                step += 1
                await run.sync(step)
            for _ in range(delay):
                await asyncio.sleep(0)
            begin = await take(run, begin.before)
            made = {s.sample_id: s.num_tokens for s in samples_of(begin)}
        check_closed(begin)
        assert set(made) or partial["max_staleness"] == 0
        first_calls = {}
        for request_id, _, budget in engine.calls:
            first_calls.setdefault(request_id.partition("#")[0], 16 - budget)
        for sample_id, num_tokens in given_tokens(given).items():
            assert first_calls.get(sample_id, num_tokens) == num_tokens, "it goes on"
        given = settings_of(begin)
    assert set(trained.values()) == {1}
    done = {prompt_position(group, len(PROMPTS)) for group in trained}
    held, discarded = set(begin.rollout.pending), begin.before.tokens_discarded
    dropped = set(range(begin.rollout.position)) - done - held
    assert not done & held and bool(dropped) == bool(discarded["stale"]), discarded


def samples_of(begin: Begin) -> list:
    live, handed_over = groups_of(begin.samples, _prompt_of)
    return [sample for group in (*live, *handed_over) for sample in group]


def given_tokens(given: dict) -> dict[str, int]:
    """Tokens of the samples that a worker began with."""
    if not given:
        return {}
    state = given["make_state"](_prompt_of)
    return {s.sample_id: s.num_tokens for group in state.groups for s in group}


def _prompt_of(group_id: str):
    from ray_apr.data.prompts import PromptSource

    return PromptSource([PROMPTS], seed=0).of(group_id)


async def test_what_has_ended_is_in_the_run_folder_before_its_checkpoint(monkeypatch):
    """known fault: the rows of the last second were in the journal of before, which a run that goes
    on with the checkpoint does not read."""
    monkeypatch.setattr(worker_module, "_HEARTBEAT_S", 60.0)
    partial = {"max_staleness": 2, "oversampling_factor": 2.0}
    async with running(ScriptedEngine(auto=1), scorer=Scorer(bad={"e0-1-1"}), **partial) as run:
        trained = {sample.sample_id for sample in await run.step(0)}
        begin = await take(run)
        rows = list(run.recorder.rows)
    assert trained <= {row["sample_id"] for row in rows if row["kind"] == "ended"}
    dropped = {row["group_id"] for row in rows if row["kind"] == "dropped"}
    assert dropped == {"e0-1"} and 1 not in begin.rollout.pending


async def test_a_capture_waits_for_rows_that_are_on_their_way(monkeypatch):
    """known fault: it returned before those that the heartbeat had taken were told."""
    monkeypatch.setattr(worker_module, "_HEARTBEAT_S", 60.0)
    async with running(ScriptedEngine(auto=1), max_staleness=2) as run:
        await run.step(0)
        takes, may_take = run.recorder.record_many, asyncio.Event()

        async def record_many(kind, rows):
            await may_take.wait()
            await takes(kind, rows)

        run.recorder.record_many = record_many
        record = run.worker._figures.record_ends
        beat, of_capture = asyncio.create_task(record()), asyncio.create_task(record())
        done, _ = await asyncio.wait({beat, of_capture}, timeout=0.2)
        may_take.set()
        await asyncio.wait_for(asyncio.gather(beat, of_capture), 10)
    assert not done


async def test_groups_that_wait_at_the_gate_are_captured_once(monkeypatch):
    """A capture waits for what was sent to the buffer, and holds what would be sent."""
    engine, slow = ScriptedEngine(auto=1), asyncio.Event()
    async with running(engine, max_staleness=4, oversampling_factor=3.0) as run:
        put = run.buffer.put_group

        async def put_late(*args):
            await slow.wait()
            await put(*args)

        run.buffer.put_group = put_late
        await until(lambda: run.worker._sessions.on_their_way)
        capturing = asyncio.create_task(run.worker.capture())
        await asyncio.sleep(0.05)
        assert not capturing.done()
        slow.set()
        taken = await capturing
        assert taken.stats.buffered_samples > 0
        table = taken.samples[0]
        ids = table["sample_id"].to_pylist()
        assert len(ids) == len(set(ids))
        generated = sum(table["num_generated"].to_pylist())
        assert generated == (taken.summary.ledger + taken.stats.ledger).generated
        assert len(await run.step(0)) == 4, "it goes on"


async def with_groups_in_the_buffer() -> Begin:
    """What a run goes on with whose buffer has groups."""
    async with running(ScriptedEngine(auto=1), max_staleness=4, oversampling_factor=3.0) as run:
        await until(lambda: run.buffer._stock.num_buffered >= 8)
        begin = await take(run)
    assert len(begin.rollout.pending) >= 4
    return begin


async def test_groups_of_a_checkpoint_are_in_a_book_until_they_are_sent():
    """The run may end before it has begun: while its engines start, say."""
    begin = await with_groups_in_the_buffer()
    run = Run(ScriptedEngine(auto=1), max_staleness=4, **settings_of(begin))
    summary, stats = await run.worker.stop(), await run.buffer.stats()
    before = begin.before.lose(0, begin.num_kept)[0].ledger
    assert (before + summary.ledger + stats.ledger).error == 0
    assert set(summary.pending_prompts) >= set(begin.rollout.pending)


async def test_a_checkpoint_before_all_groups_are_sent_again_has_them():
    begin = await with_groups_in_the_buffer()
    run = Run(ScriptedEngine(auto=1), max_staleness=4, **settings_of(begin))
    put, may_go, arrived = run.buffer.put_group, asyncio.Event(), []

    async def put_slowly(metas, refs):
        arrived.append(metas[0].group_id)
        if len(arrived) > 1:
            await may_go.wait()
        await put(metas, refs)

    run.buffer.put_group = put_slowly
    await run.worker.start()
    try:
        await until(lambda: len(arrived) == 2)
        capturing = asyncio.create_task(take(run, begin.before))
        await asyncio.sleep(0.02)
        may_go.set()
        again = await capturing
    finally:
        await run.worker.stop()
    check_closed(again)
    assert set(again.rollout.pending) >= set(begin.rollout.pending)
    groups = {sample.group_id for sample in samples_of(again)}
    assert groups >= {sample.group_id for sample in samples_of(begin)}


async def test_why_samples_cannot_go_on_is_told_at_the_start():
    """An error of the constructor would be the death of an actor, without its cause."""

    def make_state(prompt_of):
        raise ConfigError("prompts", "p", "has other tokens")

    run = Run(ScriptedEngine(auto=1), make_state=make_state)
    with pytest.raises(ConfigError, match="has other tokens"):
        await run.worker.start()
    await run.worker.stop()


async def test_rewards_that_were_not_there_yet_are_asked_for_again():
    class Slow(Scorer):
        async def score(self, sample):
            await asyncio.sleep(3600)

    async with running(ScriptedEngine(auto=2), scorer=Slow(), max_staleness=2) as run:
        await until(lambda: run.worker._scheduler.counts().finished >= 4)
        begin = await take(run)
        run.worker._main.cancel()
    check_closed(begin)
    engine = ScriptedEngine(auto=2)
    async with running(engine, max_staleness=2, **settings_of(begin)) as run:
        samples = await run.step(0)
        assert {s.response_text for s in samples} == {
            " ".join(str(FIRST_TOKEN + i) for i in range(4))
        }
        ended = {s.sample_id for s in samples_of(begin) if s.finish_reason is not None}
        asked = {request_id.partition("#")[0] for request_id, _, _ in engine.calls}
        assert ended and not ended & asked, "nothing of them is generated again"


async def test_turns_that_await_their_environment_are_asked_about_again(monkeypatch):
    monkeypatch.setattr(sessions_module, "encode_step", lambda tokenizer, sample, step: (5000,))

    class Environment(Scorer):
        def __init__(self, answers: bool) -> None:
            super().__init__()
            self.answers, self.states = answers, []

        async def step(self, sample):
            if not self.answers:
                await asyncio.sleep(3600)
            self.states.append(sample.environment_state)
            return Step(done=True, state={"seen": True})

    turns = TurnRules(max_turns=3)
    engine = ScriptedEngine(auto=1, default_length=6, turn_length=3)
    async with running(engine, scorer=Environment(False), turns=turns, max_staleness=2) as run:
        await until(lambda: run.worker._scheduler.counts().stepping >= 4)
        begin = await take(run)
        run.worker._main.cancel()
    environment = Environment(True)
    engine = ScriptedEngine(auto=1, default_length=6, turn_length=3)
    async with running(
        engine, scorer=environment, turns=turns, max_staleness=2, **settings_of(begin)
    ) as run:
        samples = await run.step(0)
        assert {s.num_tokens for s in samples} == {3}
        assert {s.finish_reason for s in samples} == {FinishReason.STOP}
    waiting = {s.sample_id for s in samples_of(begin) if s.awaits_step}
    asked = {request_id.partition("#")[0] for request_id, _, _ in engine.calls}
    assert len(waiting) >= 4 and not waiting & asked


async def test_rewards_of_an_environment_that_wait_for_the_others_come_with_their_text():
    """Without overlap a reward counts once nothing generates; a checkpoint may come before."""

    class Environment(Scorer):
        async def step(self, sample):
            return Step(done=True, reward=0.5)

    lengths = {f"e0-{o}-{i}": 3 if i else 16 for o in range(3) for i in range(2)}
    settings = {
        "turns": TurnRules(), "max_staleness": 2, "overlap_rewards": False,
        "rollout": {"max_response_tokens": 40},
    }  # fmt: skip
    engine = ScriptedEngine(lengths, auto=0)
    async with running(engine, scorer=Environment(), **settings) as run:
        await until(lambda: len(engine.running) >= 4)
        engine.advance(4)
        await until(lambda: run.worker._scheduler.counts().finished >= 2)
        begin = await take(run)
        run.worker._main.cancel()
    waiting = [sample for sample in samples_of(begin) if sample.reward is not None]
    assert waiting and all(sample.response_text for sample in waiting)
    async with running(
        ScriptedEngine(lengths, auto=2), scorer=Environment(), **settings, **settings_of(begin)
    ) as run:
        samples = await run.step(0)
    assert all(sample.response_text and sample.reward == 0.5 for sample in samples)
