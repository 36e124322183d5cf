"""The rollout worker with a scripted engine, the real buffer, and no Ray (rollout/worker.py)."""

from __future__ import annotations

import asyncio
import gc

import numpy as np
import pytest
from ray.exceptions import ActorUnavailableError

from ray_apr.core.exceptions import (
    EngineUnavailableError,
    NoEngineError,
    RolloutError,
    SyncBrokenError,
)
from ray_apr.core.heap import freeze_heap
from ray_apr.core.messages import Generation, WeightGroup
from ray_apr.core.sample import FinishReason, Segment
from ray_apr.data.journal import JournalFolder
from ray_apr.rollout import line as line_module
from ray_apr.rollout import sessions as sessions_module
from ray_apr.rollout import syncs as syncs_module
from ray_apr.rollout import worker as worker_module
from tests.fakes import FIRST_TOKEN, ScriptedEngine
from tests.rollout_run import Handle, Run, Scorer, running, until, without_ray


@pytest.fixture(autouse=True)
def no_ray(monkeypatch):
    without_ray(monkeypatch)


async def test_three_steps_with_syncs_train_whole_groups_within_the_bound():
    async with running(ScriptedEngine(auto=1), max_staleness=2, oversampling_factor=2.0) as run:
        for step in range(3):
            samples = await run.step(step)
            assert len(samples) == 4
            assert all(step - s.oldest_version <= 2 for s in samples)
            assert all(s.reward == 1.0 for s in samples)
            await run.sync(step + 1)
    await run.check_ledger(run.summary)
    assert {s.prompt.prompt_id.partition("-")[0] for s in samples} <= {"e0", "e1", "e2", "e3"}


async def test_what_the_worker_begins_with_is_spared_from_garbage_collections(monkeypatch):
    calls: list[str] = []
    monkeypatch.setattr(worker_module, "freeze_heap", freeze_heap)
    monkeypatch.setattr(gc, "collect", lambda: calls.append("collect"))
    monkeypatch.setattr(gc, "freeze", lambda: calls.append("freeze"))
    async with running(ScriptedEngine(auto=1)):
        assert calls == ["collect", "freeze"]


async def test_a_sync_interrupts_what_runs_and_it_resumes_with_its_tokens_and_budget():
    """verl#7611: a sync cancelled the rollout worker itself."""
    engine = ScriptedEngine(default_length=6)
    async with running(engine, max_staleness=2, oversampling_factor=1.0) as run:
        await until(lambda: len(engine.running) == 4)
        engine.advance(2)
        await run.sync(1)
        await until(lambda: len(engine.running) == 4)
        assert [call[2] for call in engine.calls] == [16] * 4 + [14] * 4, "the budget goes on"
        engine.advance(10)
        samples = await run.step(1)
        for sample in samples:
            assert sample.response_ids == tuple(range(FIRST_TOKEN, FIRST_TOKEN + 6))
            assert sample.token_versions == (0, 0, 1, 1, 1, 1)
            assert sample.num_interruptions == 1
    assert (run.summary.samples_interrupted, run.summary.samples_resumed) == (4, 4)
    await run.check_ledger(run.summary)


@pytest.mark.parametrize("sleep", [True, False])
async def test_colocated_engines_generate_before_a_sync_unless_they_begin_asleep(sleep):
    engine = ScriptedEngine(default_length=6)
    placement = {"engine": {"placement": "colocated", "sleep": sleep}}
    async with running(engine, rollout=placement, oversampling_factor=1.0) as run:
        assert run.worker._engines._start_limit_s == (0.0 if sleep else 600.0)
        if sleep:
            await asyncio.sleep(0.1)
            assert not engine.calls, "they have no weights"
            await run.sync(1)
        await until(lambda: len(engine.running) == 4)


async def test_max_staleness_0_starts_one_batch_a_version():
    engine = ScriptedEngine(auto=1)
    async with running(
        engine, mode="sync", max_staleness=0, oversampling_factor=1.0, interrupt="never"
    ) as run:
        for step in range(3):
            samples = await run.step(step)
            assert {v for s in samples for v in s.token_versions} == {step}
            await asyncio.sleep(0.05)
            assert len(engine.calls) == 4 * (step + 1), "nothing starts before the next version"
            await run.sync(step + 1)
    await run.check_ledger(run.summary)


async def test_batch_full_interrupts_the_surplus_until_the_next_version():
    short = dict.fromkeys(["e0-0-0", "e0-0-1", "e0-1-0", "e0-1-1"], 1)
    engine = ScriptedEngine(short, default_length=9)
    async with running(
        engine, max_staleness=1, oversampling_factor=2.0, interrupt="batch_full"
    ) as run:
        await until(lambda: len(engine.running) == 8)
        engine.advance(1)
        await until(lambda: not engine.running)
        await run.step(0)
        assert len(engine.calls) == 8
        await run.sync(1)
        await until(lambda: len(engine.calls) >= 12)
        assert {len(ids) for session, ids, _ in engine.calls[8:12]} != {1}
    assert run.summary.samples_interrupted == 4
    await run.check_ledger(run.summary)


async def test_a_failed_reward_drops_its_group_and_is_no_zero():
    scorer = Scorer(bad={"e0-0-1"})
    async with running(ScriptedEngine(auto=2), scorer=scorer, max_staleness=2) as run:
        samples = await run.step(0)
        assert "e0-0" not in {s.group_id for s in samples}
        assert {s.reward for s in samples} == {1.0}
        await until(lambda: any(row.get("reason") == "failed" for row in run.recorder.rows))
    (row,) = [row for row in run.recorder.rows if row.get("reason") == "failed"]
    assert row["error"] == "reward of sample e0-0-1 raised: no judge", (
        "it was in no file of the run"
    )
    assert run.summary.ledger.discarded["failed"] > 0
    await run.check_ledger(run.summary)


async def test_a_run_tells_what_its_rewards_take_and_its_engines_made():
    async with running(ScriptedEngine(auto=2)) as run:
        await run.step(0)
        told = lambda: [row for row in run.recorder.rows if row["kind"] == "status"]  # noqa: E731
        await until(lambda: told() and told()[-1]["engines_tokens"] > 0)
    assert told()[-1]["reward_s"] == Scorer.mean_reward_s


async def test_rewards_that_all_fail_stop_the_run_with_the_reason():
    async with running(
        ScriptedEngine(auto=2), scorer=Scorer(bad={"all"}), rollout={"max_consecutive_failures": 3}
    ) as run:
        with pytest.raises(RolloutError, match=r"3 rewards failed in a row.*no judge"):
            await run.step(0)
    await run.check_ledger(run.summary)


async def test_failures_with_generations_that_succeed_between_them_are_not_in_a_row():
    """Only a reward began the row anew: what failed now and then ended a run of long responses."""
    engine = ScriptedEngine(default_length=9)
    engine.fail = {"e0-0-0": [RolloutError("flaky")]}
    async with running(engine, rollout={"max_consecutive_failures": 2}) as run:
        await until(lambda: len(engine.running) == 8 and len(engine.calls) == 9)
        for version, sample in ((1, "e0-1-0"), (2, "e0-1-1")):
            engine.fail[sample] = [RolloutError("flaky")]
            engine.advance(2)
            await run.sync(version)
            await until(lambda: len(engine.running) == 8 and not any(engine.fail.values()))
        engine.advance(9)
        assert len(await run.step(2)) == 4
    await run.check_ledger(run.summary)


async def test_a_generation_error_is_retried_and_then_costs_its_group(monkeypatch):
    monkeypatch.setattr(sessions_module, "_RETRY_PAUSE_S", 0.0)
    engine = ScriptedEngine(auto=2)
    engine.fail = {
        "e0-0-0": [RolloutError("flaky")],
        "e0-1-1": [RolloutError("broken") for _ in range(3)],
    }
    async with running(engine, max_staleness=2) as run:
        samples = [s for step in range(2) for s in await run.step(step)]
        assert "e0-1" not in {s.group_id for s in samples}
        assert [call[0].partition("#")[0] for call in engine.calls].count("e0-0-0") == 2
        assert [call[0].partition("#")[0] for call in engine.calls].count("e0-1-1") == 3
    await run.check_ledger(run.summary)


async def test_samples_of_an_engine_that_is_gone_wait_for_another_one(monkeypatch):
    monkeypatch.setattr(sessions_module, "_RETRY_PAUSE_S", 0.0)
    engine = ScriptedEngine(auto=2)
    engine.fail = {
        sample: [EngineUnavailableError("the replica died") for _ in range(5)]
        for sample in ("e0-0-0", "e0-0-1", "e0-1-0")
    }
    async with running(engine, max_staleness=2, rollout={"max_consecutive_failures": 3}) as run:
        samples = [s for step in range(3) for s in await run.step(step)]
        assert {"e0-0", "e0-1"} <= {s.group_id for s in samples}
    await run.check_ledger(run.summary)


async def test_samples_that_fail_together_of_one_cause_do_not_end_a_run(monkeypatch):
    monkeypatch.setattr(sessions_module, "_RETRY_PAUSE_S", 0.0)
    engine = ScriptedEngine(auto=2)
    engine.fail = {
        f"e0-{group}-{i}": [RolloutError(f"request e0-{group}-{i}#0: cut off")]
        for group in range(3)
        for i in range(2)
    }
    async with running(engine, max_staleness=2, rollout={"max_consecutive_failures": 3}) as run:
        assert len(await run.step(0)) == 4
    await run.check_ledger(run.summary)


async def test_an_engine_that_dies_while_it_is_asked_to_abort_does_not_end_a_run():
    class Mortal(ScriptedEngine):
        num_asked = 0

        async def abort(self, request_ids=None):
            if request_ids is not None:
                self.num_asked += 1
                raise EngineUnavailableError("it died just now")
            return await super().abort(None)

    engine, bad = Mortal(lengths={"e0-0-1": 12}), Scorer(bad={"e0-0-0"})
    async with running(engine, scorer=bad, max_staleness=2) as run:
        await until(lambda: len(engine.running) == 8)
        engine.advance(4)
        await until(lambda: engine.num_asked == 1)
        step = asyncio.create_task(run.step(0))
        while not step.done():
            engine.advance(4)
            await asyncio.sleep(0.01)
        assert len(step.result()) == 4
    await run.check_ledger(run.summary)


async def test_an_engine_that_is_slow_to_abort_holds_up_no_calls_of_others():
    """known fault: nothing was started until it had answered, for up to a minute."""

    class Slow(ScriptedEngine):
        def __init__(self, **given):
            super().__init__(**given)
            self.asked, self.answers = [], asyncio.Event()

        async def abort(self, request_ids=None):
            if request_ids is not None:
                self.asked += request_ids
                await self.answers.wait()
            return await super().abort(request_ids)

    engine, bad = Slow(lengths={"e0-0-1": 12}), Scorer(bad={"e0-0-0"})
    async with running(engine, scorer=bad, max_staleness=2) as run:
        await until(lambda: len(engine.running) == 8)
        engine.advance(4)
        await until(lambda: len(engine.asked) == 1)
        await until(lambda: len(engine.running) > 1)  # the group in its place
        before = len(engine.calls)
        engine._end(engine.running[-1], FinishReason.ABORT)
        try:
            await until(lambda: len(engine.calls) > before)  # it goes on
        finally:
            assert engine.asked[0] in engine.running
            engine.answers.set()
        await until(lambda: engine.asked[0] not in engine.running)
    await run.check_ledger(run.summary)


async def test_a_run_whose_engines_are_gone_still_tells_its_figures():
    class Mortal(ScriptedEngine):
        is_dead = False

        async def abort(self, request_ids=None):
            self._check()
            return await super().abort(request_ids)

        async def status(self, *, drain=True):
            self._check()
            return await super().status(drain=drain)

        def _check(self) -> None:
            if self.is_dead:
                raise EngineUnavailableError("no rollout server runs")

    engine = Mortal(auto=2)
    async with running(engine, max_staleness=2) as run:
        await run.step(0)
        engine.is_dead = True
        for request_id in engine.running:
            engine._end(request_id, FinishReason.ABORT)
    (status,) = run.summary.engines
    assert status.tokens_generated == run.summary.ledger.generated > 0


async def test_a_broken_sync_raises_and_leaves_no_engine_paused():
    engine = ScriptedEngine(auto=1)
    async with running(engine, max_staleness=2) as run:
        await run.step(0)
        engine.fail_next_sync = RolloutError("the sender died")
        with pytest.raises(Exception, match="the sender died"):
            await run.sync(1)
        assert not engine.is_paused


async def test_stop_ends_requests_that_would_run_for_ever():
    engine = ScriptedEngine(default_length=16)  # nothing advances it
    async with running(engine, max_staleness=2) as run:
        await until(lambda: len(engine.running) == 8)
    assert not engine.running
    assert run.summary.samples_interrupted == 0, "what the end of the run stops is not counted"


# -- the settings of the modes ---------------------------------------------------------------


async def test_restart_drops_the_tokens_of_what_is_interrupted_and_begins_anew():
    engine = ScriptedEngine(default_length=6)
    async with running(
        engine,
        max_staleness=0,
        oversampling_factor=2.0,
        interrupt="batch_full",
        after_interrupt="restart",
    ) as run:
        await until(lambda: len(engine.running) == 8)
        first = engine.running[:4]
        engine.advance(2)
        engine.advance(4, first)
        samples = await run.step(0)
        assert len(samples) == 4
        await until(lambda: not engine.running)
        await run.sync(1)
        await until(lambda: len(engine.running) == 8)
        assert {budget for _, _, budget in engine.calls[8:]} == {16}, "a whole new budget"
        engine.advance(6)
        samples = await run.step(1)
        assert {v for s in samples for v in s.token_versions} == {1}
    assert run.summary.ledger.discarded["restarted"] == 4 * 2
    await run.check_ledger(run.summary)


async def test_discard_gives_up_the_groups_of_what_is_interrupted():
    engine = ScriptedEngine(default_length=6)
    async with running(
        engine, max_staleness=2, oversampling_factor=1.0, after_interrupt="discard"
    ) as run:
        await until(lambda: len(engine.running) == 4)
        before = set(engine.running)
        engine.advance(2)
        await run.sync(1)
        await until(lambda: len(engine.running) == 4)
        assert not {r.partition("#")[0] for r in engine.running} & {
            r.partition("#")[0] for r in before
        }
    assert run.summary.ledger.discarded["surplus"] == 4 * 2
    await run.check_ledger(run.summary)


async def test_drain_lets_what_runs_end_before_the_sync():
    engine = ScriptedEngine(default_length=12)
    async with running(
        engine, max_staleness=1, oversampling_factor=2.0, interrupt="never", drain=True
    ) as run:
        await until(lambda: len(engine.running) == 8)
        engine.advance(4)
        sync = asyncio.create_task(run.sync(1))
        await asyncio.sleep(0.05)
        assert not sync.done() and engine.policy_version == 0
        engine.advance(8)
        await sync
        samples = await run.step(1)
        assert {s.token_versions for s in samples} == {(0,) * 12}
    assert run.summary.samples_interrupted == 0


async def test_a_drain_that_no_engine_answers_is_a_sync_to_try_again(monkeypatch):
    """known fault: it ended the run, though another try would have gone through."""
    engine = ScriptedEngine(auto=1)
    async with running(
        engine, max_staleness=1, oversampling_factor=2.0, interrupt="never", drain=True
    ) as run:
        for error in (
            RolloutError("pause: no answer within the time limit"),
            NoEngineError("pause: no rollout server runs"),
        ):

            async def pause(mode, error=error):
                raise error

            with monkeypatch.context() as patch:
                patch.setattr(engine, "pause", pause)
                with pytest.raises(SyncBrokenError, match=str(error)):
                    await run.worker.begin_sync(1)
        await run.sync(1)


async def test_rewards_wait_for_the_end_of_generation_where_they_do_not_overlap():
    engine, scorer = ScriptedEngine(default_length=6), Scorer()
    async with running(
        engine,
        scorer=scorer,
        mode="sync",
        max_staleness=0,
        oversampling_factor=1.0,
        interrupt="never",
        overlap_rewards=False,
    ) as run:
        await until(lambda: len(engine.running) == 4)
        engine.advance(6, engine.running[:3])
        await until(lambda: len(engine.running) == 1)
        assert scorer.texts == []
        engine.advance(6)
        assert len(await run.step(0)) == 4
        assert len(scorer.texts) == 4


async def test_groups_without_a_signal_are_filtered_replaced_and_tried_again():
    rewards = {"e0-0-0": 0.0, "e0-0~1-0": 0.0}
    async with running(
        ScriptedEngine(auto=1),
        scorer=Scorer(by_sample=rewards),
        max_staleness=0,
        oversampling_factor=1.0,
        batch_size=2,
        filter_zero_variance=True,
        max_filter_retries=1,
    ) as run:
        samples = await run.step(0)
        assert [s.sample_id for s in samples] == ["e0-0-0", "e0-0-1"]
        assert [s.reward for s in samples] == [0.0, 1.0]
        await run.sync(1)
        await until(lambda: len(run.engine.calls) >= 8)
        names = [call[0].partition("#")[0] for call in run.engine.calls]
        assert names[2:8] == ["e0-1-0", "e0-1-1", "e0-1~1-0", "e0-1~1-1", "e0-2-0", "e0-2-1"]
    assert run.summary.ledger.discarded["filtered"] > 0
    dropped = {r["group_id"]: r for r in run.recorder.rows if r["kind"] == "dropped"}
    assert dropped["e0-1"]["retried"] is True and "retried" not in dropped["e0-1~1"]
    await run.check_ledger(run.summary)


async def test_masked_tokens_are_told_apart_from_those_that_were_trained(monkeypatch):
    """known fault: rows of steps did not count what was too old among `tokens_discarded`."""
    monkeypatch.setattr(worker_module, "_HEARTBEAT_S", 0.01)
    engine = ScriptedEngine(default_length=6)
    async with running(engine, max_staleness=1, oversampling_factor=1.0, on_stale="mask") as run:
        await until(lambda: len(engine.running) == 4)
        for version in (1, 2, 3):
            engine.advance(1)
            await run.sync(version)
            await until(lambda: len(engine.running) == 4)
        engine.advance(3)
        assert len(await run.step(3)) == 4
        stats = await run.buffer.stats()
        told = lambda: [row for row in run.recorder.rows if row["kind"] == "status"]  # noqa: E731
        await until(lambda: told()[-1]["tokens_discarded"] == 4 * 2)
    tokens = (stats.ledger.trained, stats.ledger.discarded["masked"])
    assert tokens == (4 * 4, 4 * 2), "versions 2, 3, 3, 3"
    rows = [row for row in run.recorder.rows if row["kind"] == "sample"]
    assert {(row["staleness"], row["num_masked_tokens"]) for row in rows} == {(1, 2)}


async def test_the_limits_follow_what_the_engines_report(monkeypatch):
    monkeypatch.setattr(worker_module, "_HEARTBEAT_S", 0.01)
    engine = ScriptedEngine(default_length=6)
    async with running(
        engine, max_staleness=2, oversampling_factor=2.0, max_inflight="adaptive"
    ) as run:
        await until(lambda: len(engine.running) == 6)
        assert engine.limits == {"engine-0": 6}, "half way between one batch and two"
        engine.num_queued = 4
        await until(lambda: engine.limits == {"engine-0": 2})
        engine.num_queued = 0
        engine.advance(6)
        await run.step(0)
        await until(lambda: len(engine.running) == 2)


async def test_the_users_filter_drops_groups_and_others_take_their_place():
    seen = []

    def keep(group):
        seen.append([sample.reward for sample in group])
        return group[0].group_id != "e0-0"

    async with running(ScriptedEngine(auto=2), group_filter=keep, max_staleness=2) as run:
        samples = await run.step(0)
        assert "e0-0" not in {s.group_id for s in samples} and len(samples) == 4
    assert all(rewards == [1.0, 1.0] for rewards in seen), "it sees scored groups"
    assert run.summary.ledger.discarded["filtered"] > 0
    await run.check_ledger(run.summary)


async def test_a_filter_that_raises_ends_the_run_with_its_error():
    def keep(group):
        raise KeyError("answer")

    async with running(ScriptedEngine(auto=2), group_filter=keep) as run:
        with pytest.raises(RolloutError, match=r"group filter raised for group .*answer"):
            await run.step(0)


@pytest.mark.parametrize("said", [None, [], "no", object()])
async def test_a_filter_that_says_neither_yes_nor_no_ends_the_run(said):
    """known fault: one without its `return` dropped every group, without a word."""
    async with running(ScriptedEngine(auto=2), group_filter=lambda group: said) as run:
        with pytest.raises(RolloutError, match=r"filter returned .* for group e.*True or False"):
            await run.step(0)


@pytest.mark.parametrize("said", [True, 1, 0.5, np.True_])
async def test_a_filter_may_say_yes_by_a_number(said):
    async with running(ScriptedEngine(auto=2), group_filter=lambda group: said) as run:
        assert len(await run.step(0)) == 4
    await run.check_ledger(run.summary)


async def test_a_run_that_goes_on_generates_nothing_before_the_engines_have_its_weights():
    """The engines start with the base model, whose tokens would be of another version."""
    engine = ScriptedEngine(auto=1)
    run = Run(engine, max_staleness=1, oversampling_factor=1.0, policy_version=5)
    await run.worker.start()
    try:
        await asyncio.sleep(0.1)
        assert engine.tokens_generated == 0
        await run.sync(5)
        async with asyncio.timeout(10):
            samples = await run.step(5)
        assert {v for sample in samples for v in sample.token_versions} == {5}
    finally:
        await run.worker.stop()


async def test_a_worker_that_follows_another_one_may_be_asked_before_its_engines_run():
    """known fault: a sync that reached it then was an error, which ended the run."""
    run = Run(ScriptedEngine(auto=1))
    asked = [
        asyncio.create_task(call)
        for call in (
            run.worker.join_weight_group(WeightGroup(timeout_s=1.0, endpoint=b""), {}),
            run.worker.expect_scores(1, []),
            run.worker.weight_scores(),
            run.worker.begin_sync(1),
        )
    ]
    scaled = asyncio.create_task(run.worker.scale(1))
    await asyncio.sleep(0.02)
    assert not any(task.done() for task in (*asked, scaled))
    await run.worker.start()
    try:
        async with asyncio.timeout(5):
            assert (await asyncio.gather(*asked))[-1]
        await run.worker.finish_sync(1)
        assert run.worker._scheduler.policy_version == 1
        await scaled
    finally:
        await run.worker.stop()


async def test_a_worker_that_takes_engines_over_says_in_time_that_it_does(monkeypatch):
    """known fault: the trainer waited no longer than 75 s for the answer, and the run failed."""
    monkeypatch.setattr(syncs_module, "_LOOK_S", 0.01)
    run = Run(ScriptedEngine(auto=1))
    async with asyncio.timeout(5):
        assert await run.worker.weight_group_state() is None
    await run.worker.start()
    assert (await run.worker.weight_group_state()).num_workers == 1
    await run.worker.stop()


@pytest.mark.parametrize("started", [True, False])
async def test_a_worker_goes_on_under_a_version_whose_sync_another_one_began(started):
    run = Run(ScriptedEngine(auto=1, policy_version=3), policy_version=2)
    if started:
        await run.worker.start()
    assert set((await run.worker.finish_sync(3)).values()) == {0}
    assert run.worker._scheduler.policy_version == 3
    await run.worker.stop()


async def test_a_worker_outlives_broken_connections_to_its_buffer(monkeypatch):
    """known fault: the first one ended the run, though the buffer lived and had been told."""
    monkeypatch.setattr(line_module, "_PAUSE_S", 0.01)
    run = Run(ScriptedEngine(auto=1), max_staleness=2, oversampling_factor=2.0)
    broken = {}
    verbs = ("put_group", "watch", "report_rollout")
    for verb, method in [(verb, getattr(run.buffer, verb)) for verb in verbs]:

        async def cut_off(*args, verb=verb, call=method):
            answer = await call(*args)
            broken[verb] = broken.get(verb, 0) + 1
            if broken[verb] % 2:
                raise ActorUnavailableError("connection reset", None)
            return answer

        setattr(run.buffer, verb, cut_off)
    await run.worker.start()
    async with asyncio.timeout(20):
        for step in range(3):
            assert len(await run.step(step)) == 4
            await run.sync(step + 1)
    summary = await run.worker.stop()
    await run.check_ledger(summary)
    assert broken.keys() == set(verbs)
    assert (await run.buffer.failure()) is None


async def test_an_actor_that_is_not_reached_is_not_asked_for_ever(monkeypatch):
    monkeypatch.setattr(line_module, "_PAUSE_S", 0.01)
    monkeypatch.setattr(line_module, "RESTART_LIMIT_S", 0.5)

    class Unreached:
        async def verb(self, number):
            calls.append(number)
            raise ActorUnavailableError("connection reset", None)

    calls: list[int] = []
    with pytest.raises(ActorUnavailableError):
        await line_module.Line(Handle(Unreached())).verb.remote(7)
    assert len(calls) > 2 and set(calls) == {7}


async def test_tokens_of_a_call_that_was_given_up_are_lost_and_counted():
    """known fault: the engine had counted them, and the ledger had not."""
    engine = ScriptedEngine(auto=1)
    async with running(engine, max_staleness=1) as run:
        await run.step(0)
        segments = (Segment(policy_version=0, token_ids=(7, 7, 7), logprobs=(0.0,) * 3),)
        engine.tokens_generated += 3
        late = Generation(
            request_id="s#0", segments=segments, finish_reason=FinishReason.ABORT,
            replica_id="engine-0",
        )  # fmt: skip
        engine.on_late(late)
    await run.check_ledger(run.summary)
    assert run.summary.ledger.discarded["lost"] == 3
    assert run.worker._engines.received == {"engine-0": engine.tokens_generated}


async def test_a_start_that_is_told_again_meanwhile_begins_once(monkeypatch):
    """The driver asks again where the connection broke; both would take the engines over."""
    run, may_go, taken = Run(ScriptedEngine(auto=1)), asyncio.Event(), []

    async def take_over(client, received):
        taken.append(received)
        await may_go.wait()
        return 0

    run.worker._received = {}
    monkeypatch.setattr(run.worker._engines, "take_over", take_over)
    starts = [asyncio.create_task(run.worker.start()) for _ in range(2)]
    await asyncio.sleep(0.01)
    may_go.set()
    await asyncio.gather(*starts)
    await run.worker.stop()
    assert taken == [{}]


async def test_a_group_on_its_way_to_the_buffer_is_waited_for(tmp_path):
    """known fault: it was neither unfinished nor there, and expired while others were trained."""
    engine = ScriptedEngine(default_length=2)
    async with running(
        engine, batch_size=2, on_stale="wait", max_staleness=2, oversampling_factor=3.0,
        max_live_batches=None, journal={"journal": JournalFolder.of(str(tmp_path))},
    ) as run:  # fmt: skip
        await until(lambda: len(engine.running) == 6)
        due = engine.running[0].partition("#")[0].rpartition("-")[0]

        def calls(*, of_due):
            return [call for call in engine.running if call.startswith(f"{due}-") is of_due]

        engine.advance(1, calls(of_due=True))  # it has tokens of version 0
        for step in range(2):
            engine.advance(99, calls(of_due=False)[:2])
            assert due not in {sample.group_id for sample in await run.step(step)}
            await run.sync(step + 1)
            await until(lambda: len(calls(of_due=False)) >= 2)
        engine.advance(99, calls(of_due=False)[:2])
        stock = run.buffer._stock
        await until(lambda: stock.num_waiting == 2)
        await run.buffer.grant(2, 2)
        await asyncio.sleep(0.05)
        assert not stock.granted.groups, "a newer group is there, and the older one is to come"
        held = asyncio.Event()
        may = run.worker._sessions._may_hand_over
        run.worker._sessions._may_hand_over = held  # as during a capture
        engine.advance(99, calls(of_due=True))
        await until(lambda: due in run.worker._sessions.on_their_way)
        run.worker._wake.set()
        await asyncio.sleep(0.1)
        assert not stock.granted.groups, "it is on its way"
        run.worker._sessions._may_hand_over = may
        held.set()
        await until(lambda: bool(stock.granted.groups))
        assert [group.group_id for group in stock.granted.groups] == [due]
