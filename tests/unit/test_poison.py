"""Prompts that kill engines are found and set aside, and no others
(scheduling/suspects.py, rollout/poison.py)."""

from __future__ import annotations

import asyncio
import itertools
import json
import random

import pyarrow as pa
import pytest

from ray_apr.config import PartialRolloutConfig
from ray_apr.core.exceptions import (
    ConfigError,
    EngineDiedError,
    EngineUnavailableError,
    RolloutError,
)
from ray_apr.core.messages import Generation
from ray_apr.core.sample import FinishReason, Prompt, SampleState, Segment
from ray_apr.data.prompts import TOKEN_IDS
from ray_apr.rollout import poison as poison_module
from ray_apr.rollout import sessions as sessions_module
from ray_apr.run.recorder import RunRecorder
from ray_apr.run.resume import poison_rows
from ray_apr.scheduling import suspects as suspects_module
from ray_apr.scheduling.order import prompt_position
from ray_apr.scheduling.scheduler import Scheduler
from ray_apr.scheduling.suspects import CONVICTED, ON_TRIAL, came_back, died
from tests.fakes import MortalEngines
from tests.rollout_run import Scorer, running, until, without_ray
from tests.virtual_time import run_in_virtual_time


def scheduler(max_inflight=64, groups=40, size=1, **settings) -> Scheduler:
    made = Scheduler(
        PartialRolloutConfig(**{"oversampling_factor": 1.0, "max_staleness": 1} | settings),
        batch_size=groups * size,
        group_size=size,
        max_inflight=max_inflight,
        budgets=lambda prompt: [16],
    )
    prompts = iter([Prompt(prompt_id=f"e0-{i}", token_ids=(1,)) for i in range(groups)])
    made.next_prompt = lambda: next(prompts, None)
    return made


def some(num_tokens=1, reason=FinishReason.ABORT) -> Generation:
    part = Segment(policy_version=0, token_ids=(7,) * num_tokens, logprobs=(0.0,) * num_tokens)
    return Generation(request_id="r", segments=(part,), finish_reason=reason)


def kill(made: Scheduler, lives, ran_s=1.0) -> None:
    for live in lives:
        died(live, ran_s)
    for live in lives:
        made.on_retry(live)


def test_the_more_deaths_in_a_row_the_fewer_suspects_run_at_once():
    made = scheduler()
    start = made.tick(made.next_prompt).start
    assert len(start) == 40
    seen = []
    for _ in range(CONVICTED - 1):
        kill(made, start)
        start = made.tick(made.next_prompt).start
        assert not made.tick(made.next_prompt).start
        seen.append(len(start))
    assert seen == [40, 16, 1, 1]
    assert start[0].sample.num_deaths == CONVICTED - 1


def test_samples_without_a_death_run_beside_suspects():
    made = scheduler(groups=8)
    first, *others = made.tick(made.next_prompt).start
    for _ in range(3):
        kill(made, [first])
        assert made.tick(made.next_prompt).start == [first]
    assert len(made.live.inflight) == 8
    kill(made, others[:2])
    assert not made.tick(made.next_prompt).start, "they would be two"
    died(first, 1.0)
    made.on_generation(first, some(16, FinishReason.LENGTH))
    assert made.tick(made.next_prompt).start == others[:2]


def test_an_entry_that_is_left_of_a_suspect_starts_nothing():
    """known fault: it ran beside another one with three deaths, out of the queue of those without
    a death, in which it had been twice."""
    made = scheduler(max_inflight=4, groups=4)
    first, *others = made.tick(made.next_prompt).start
    made.on_generation(first, some())
    made.live.hold_back(first)
    made.live.release()
    assert made.tick(made.next_prompt).start == [first]
    started = []
    for _ in range(3):
        kill(made, [*others, first])
        started.append(made.tick(made.next_prompt).start)
    assert [len(start) for start in started] == [4, 4, 1]


def test_suspects_whose_calls_nothing_cuts_make_room_with_their_tokens():
    made = scheduler(groups=8)
    start = made.tick(made.next_prompt).start
    kill(made, start)
    assert len(made.tick(made.next_prompt).start) == 8
    kill(made, start[:1])
    actions = made.tick(made.next_prompt)
    assert actions.start == [start[0]], "there is room for 16"
    kill(made, start[:1])
    actions = made.tick(made.next_prompt)
    assert (actions.start, set(actions.abort)) == ([], set(start[1:]))
    assert not made.tick(made.next_prompt).abort, "once is enough"
    for live in start[1:]:
        came_back(live, some(), 1.0)
        made.on_generation(live, some())
    assert made.tick(made.next_prompt).start == start[:1]
    came_back(start[0], some(), 1.0)
    made.on_generation(start[0], some())
    assert start[0].sample.num_deaths == ON_TRIAL
    assert len(made.tick(made.next_prompt).start) == 8


@pytest.mark.parametrize("reason", ["restart", "discard"])
def test_where_interruption_costs_tokens_no_suspect_is_interrupted(reason):
    made = scheduler(groups=8, interrupt="batch_full", after_interrupt=reason)
    start = made.tick(made.next_prompt).start
    kill(made, start)
    made.tick(made.next_prompt)
    kill(made, start[:1])
    kill(made, [made.tick(made.next_prompt).start[0]])
    actions = made.tick(made.next_prompt)
    assert (actions.start, actions.abort) == ([], [])


def test_a_suspect_is_cleared_by_its_end_or_by_twice_the_time_that_it_ran():
    made = scheduler(groups=2)
    one, other = made.tick(made.next_prompt).start
    for live in (one, other):
        died(live, 10.0)
    came_back(one, some(0), 60.0)
    assert one.sample.num_deaths == 1, "without a token nothing is known"
    came_back(one, some(), 10.0)
    assert one.sample.num_deaths == 1
    came_back(one, some(), 10.0 + suspects_module.TRIAL_S)
    assert one.sample.num_deaths == 0
    came_back(other, some(reason=FinishReason.STOP), 0.1)
    assert (other.sample.num_deaths, other.trial_s) == (0, 0.0)


def test_a_token_on_trial_takes_back_what_was_beyond_two_deaths():
    made = scheduler(groups=1)
    (live,) = made.tick(made.next_prompt).start
    for _ in range(CONVICTED - 1):
        died(live, 10.0)
    came_back(live, some(0), 1.0)
    assert (live.sample.num_deaths, live.cut_s) == (CONVICTED - 1, 2 * suspects_module.TRIAL_S)
    came_back(live, some(), 1.0)
    assert (live.sample.num_deaths, live.cut_s) == (ON_TRIAL, 0.0)


def test_the_one_that_has_the_most_deaths_keeps_its_place_while_it_waits_to_try_again():
    """Else each of its siblings would take an engine along first."""
    made = scheduler(groups=1, size=4)
    start = made.tick(made.next_prompt).start
    for _ in range(3):
        kill(made, start)
        start = made.tick(made.next_prompt).start
    (first,) = start
    died(first, 1.0)
    assert not made.tick(made.next_prompt).start, "it pauses"
    made.on_retry(first)
    assert made.tick(made.next_prompt).start == [first]


def test_what_an_engine_died_under_is_not_put_off_for_a_catch_up_round():
    made = scheduler(groups=1)
    (live,) = made.tick(made.next_prompt).start
    assert not live.is_untried
    kill(made, [live])
    assert live.state is SampleState.WAITING and not live.is_untried


def test_prompts_that_are_set_aside_are_not_tried_again():
    made = scheduler(groups=1)
    prompts = [Prompt(prompt_id=f"e0-{i}", token_ids=(1,)) for i in range(3)]
    for prompt in prompts:
        made._retries.after_filter(prompt)
    forgotten = made.forget(lambda prompt: prompt.prompt_id.startswith("e0-1"))
    assert [prompt.prompt_id for prompt in forgotten] == ["e0-1~1"]
    assert [prompt.prompt_id for prompt in made._retries] == ["e0-0~1", "e0-2~1"]


# -- with a worker ---------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    without_ray(monkeypatch)
    monkeypatch.setattr(suspects_module, "TRIAL_S", 0.02)
    monkeypatch.setattr(poison_module, "TRIAL_S", 0.02)
    monkeypatch.setattr(poison_module, "_ASK_S", 0.0)
    monkeypatch.setattr(poison_module, "_SPARE_S", 0.5)
    monkeypatch.setattr(sessions_module, "_RETRY_PAUSE_S", 0.002)


async def train(run, num_steps=None, until=lambda: False, step_s=0.0):
    samples = []
    for step in itertools.count() if num_steps is None else range(num_steps):
        samples += await run.step(step)
        await asyncio.sleep(step_s)
        await run.sync(step + 1)
        if until():
            break
    return samples


def found(run):
    """Rows of the prompts that were set aside, also those that are not written yet."""
    written = [row for row in run.recorder.rows if row["kind"] == "poison"]
    return written + run.worker._poison.convicted


def prompts(*poisoned, num=150):
    """Prompts of which some have another first token."""
    ids = [[9 if i in poisoned else 1, i] for i in range(num)]
    return pa.table({"prompt": [f"prompt {i}" for i in range(num)], TOKEN_IDS: ids})


@pytest.mark.parametrize("num_engines", [2, 4])
@pytest.mark.parametrize("after", [0, 3])
def test_a_prompt_that_kills_its_engine_is_set_aside_and_all_others_are_trained(
    monkeypatch, num_engines, after
):
    """It ended every engine, one after the other. In virtual time: on a busy machine more engines
    were gone at once."""

    async def work() -> None:
        engines = MortalEngines(num_engines, default_length=8, turn_s=0.002, poison={(9, 5): after})
        sizes = {"num_replicas": num_engines}
        settings = {"max_staleness": 3, "oversampling_factor": 3.0, "rollout": sizes}
        async with running(engines, prompts=prompts(5), **settings) as run:
            is_done = lambda: found(run) and run.worker._prompts.position > 330  # noqa: E731
            samples = await train(run, until=is_done, step_s=0.02)
        assert engines.most_dead < num_engines, "the run would have ended"
        (row,) = found(run)
        assert (row["row"], row["prompt"], row["num_prompt_tokens"]) == (5, "prompt 5", 2)
        assert (row["deaths"], row["error"][-7:]) == (CONVICTED, "is dead")
        # siblings may be on two engines; a sync between two deaths takes some back, and brings the
        # sample nearer to its token
        assert CONVICTED <= engines.num_deaths <= 2 * CONVICTED
        trained = {sample.prompt.row["prompt"] for sample in samples}
        assert len(trained) > 140 and "prompt 5" not in trained
        rows = [r for r in run.recorder.rows if r["kind"] == "dropped"]
        poisoned = {r["group_id"] for r in rows if r["reason"] == "poison"}
        assert {run.worker._prompts.index_of(group) for group in poisoned} == {5}
        dropped = {r["group_id"] for r in rows}
        stats = await run.buffer.stats()
        known = {*dropped, *stats.held_groups, *(sample.group_id for sample in samples)}
        positions = {prompt_position(group, 150) for group in known} | {
            *run.summary.pending_prompts
        }
        assert positions == set(range(run.summary.prompts_position)), "none is lost"
        await run.check_ledger(run.summary)

    run_in_virtual_time(monkeypatch, work)


async def test_several_such_prompts_are_all_found_and_nothing_else():
    engines = MortalEngines(6, default_length=8, poison={(9, i): 0 for i in (3, 7, 14)})
    settings = {"max_staleness": 3, "oversampling_factor": 3.0, "rollout": {"num_replicas": 6}}
    async with running(engines, prompts=prompts(3, 7, 14), **settings) as run:
        await train(run, until=lambda: len(found(run)) == 3)
    assert sorted(row["row"] for row in found(run)) == [3, 7, 14]
    assert engines.num_deaths <= 2 * 3 * CONVICTED
    await run.check_ledger(run.summary)


def test_engines_that_die_by_chance_by_the_hundred_convict_nobody(monkeypatch):
    """In virtual time: on a busy machine calls on trial took longer, and more engines died in them
    than by the chance that is meant."""

    async def work() -> None:
        engines = MortalEngines(4, default_length=12, restart_s=0.05, turn_s=0.01)
        chance = random.Random(0)
        settings = {"max_staleness": 3, "oversampling_factor": 4.0, "batch_size": 8}
        sizes = {"num_replicas": 4, "max_response_tokens": 32}
        async with running(
            engines, limit_s=60, prompts=prompts(), rollout=sizes, **settings
        ) as run:
            training = asyncio.create_task(train(run))
            while engines.num_deaths < 100:
                assert not training.done()
                await asyncio.sleep(chance.expovariate(1 / 0.15))
                if len(engines.living) > 1:
                    engines.kill(chance.choice(engines.living))
            training.cancel()
            await asyncio.wait({training})
        assert engines.num_lost > 100, "samples that ran there"
        assert not [r for r in run.recorder.rows if r["kind"] == "poison"]
        await run.check_ledger(run.summary)

    run_in_virtual_time(monkeypatch, work)


async def test_too_many_such_prompts_end_the_run_with_their_names():
    engines = MortalEngines(4, poison={(9, 5): 0})
    sizes = {"num_replicas": 4, "max_poison_prompts": 0}
    async with running(engines, prompts=prompts(5), max_staleness=3, rollout=sizes) as run:
        with pytest.raises(RolloutError, match=r"1 prompts .* rows \[5\].*max_poison_prompts = 0"):
            await train(run)
    await run.check_ledger(run.summary)


async def test_an_engine_that_cannot_be_had_counts_for_nothing():
    engines = MortalEngines(4)
    engines.fail = {
        "e0-0-0": [EngineUnavailableError("no replica")] * 20,
        "e0-1-0": [EngineDiedError("it died"), EngineUnavailableError("no replica")] * 4,
    }
    async with running(engines, max_staleness=3, rollout={"num_replicas": 4}) as run:
        assert len(await train(run, 2)) == 8
    assert not [r for r in run.recorder.rows if r["kind"] == "poison"]
    await run.check_ledger(run.summary)


async def test_a_prompt_that_is_known_to_kill_is_not_handed_out_and_its_groups_are_dropped():
    engines = MortalEngines(2, poison={(3,): 0})
    async with running(engines, max_staleness=3, poison=[1], rollout={"num_replicas": 2}) as run:
        samples = await train(run, 5)
    assert {sample.prompt.row["prompt"] for sample in samples} == {"a", "c"}
    assert engines.num_deaths == 0
    assert {r["reason"] for r in run.recorder.rows if r["kind"] == "dropped"} == {"poison"}


async def test_a_prompt_that_is_set_aside_and_was_to_be_tried_again_has_a_row():
    """known fault: its last row said that it was dropped to be tried again."""
    async with running(MortalEngines(1), max_staleness=3) as run:
        poison, scheduler = run.worker._poison, run.worker._scheduler
        prompt = run.worker._prompts.of("e7-0")
        scheduler._retries.after_filter(prompt)
        poison._set_aside.add(run.worker._prompts.index_of("e7-0"))
        poison.drop_known()
    rows = [r for r in run.recorder.rows if r["kind"] == "dropped"]
    assert [r["reason"] for r in rows if r["group_id"] == "e7-0~1"] == ["poison"]


async def test_where_every_prompt_is_set_aside_none_is_looked_for():
    async with running(MortalEngines(1), max_staleness=3, poison=[0, 1, 2]) as run:
        assert run.worker._poison.next_prompt() is None


# -- retries and failures --------------------------------------------------------------------


async def test_the_tries_of_one_prompt_are_bounded_together():
    """Each try of a prompt had failures of its own."""
    engines = MortalEngines(1)
    engines.fail = {
        f"e0-0{again}-{i}": [RolloutError("refused")] * times
        for again, times in (("", 2), ("~1", 10))
        for i in range(2)
    }
    async with running(
        engines,
        scorer=Scorer(by_sample={"e0-0-0": 0.0, "e0-0-1": 0.0}),
        max_staleness=0,
        oversampling_factor=1.0,
        filter_zero_variance=True,
        max_filter_retries=1,
        batch_size=2,
        rollout={"max_request_failures": 3, "max_consecutive_failures": 99},
    ) as run:
        await until(lambda: any(r.get("reason") == "failed" for r in run.recorder.rows))
    names = [call[0].partition("#")[0] for call in engines.calls]
    assert [names.count(f"e0-0-{i}") for i in range(2)] == [3, 3]
    assert [names.count(f"e0-0~1-{i}") for i in range(2)] == [1, 1], "3 x 2 are spent"
    await run.check_ledger(run.summary)


@pytest.mark.parametrize("kind", ["reward", "generation", "poison"])
async def test_what_fails_is_never_a_reward(kind):
    engines = MortalEngines(4, poison={(9, 5): 0} if kind == "poison" else {})
    if kind == "generation":
        engines.fail = {f"e{e}-{o}-0": [RolloutError("no")] * 3 for e in range(9) for o in (0, 2)}
    scorer = Scorer(bad={f"e{e}-0-1" for e in range(9)} if kind == "reward" else ())
    sizes = {"num_replicas": 4}
    async with running(
        engines, scorer=scorer, prompts=prompts(5), max_staleness=3, rollout=sizes
    ) as run:
        is_done = lambda: found(run) or kind != "poison"  # noqa: E731
        samples = [*await train(run, until=is_done), *await run.step(run.engine.policy_version)]
    assert {sample.reward for sample in samples} == {1.0}
    assert all(sample.num_tokens for sample in samples)


@pytest.mark.parametrize("value", [-1, 1.5, None])
def test_the_setting_is_obeyed_or_refused(value):
    from ray_apr.config import RolloutConfig

    with pytest.raises(ConfigError, match=r"rollout\.max_poison_prompts"):
        RolloutConfig(max_poison_prompts=value)


# -- the run folder --------------------------------------------------------------------------


async def test_the_file_of_such_prompts_is_read_where_the_run_goes_on(tmp_path):
    assert poison_rows(tmp_path) == ()
    recorder = RunRecorder(str(tmp_path), started_at=0.0)
    await recorder.record_many("poison", [{"row": 7}, {"row": 3}])
    await recorder.close()
    with (tmp_path / "poison.jsonl").open("a") as file:
        file.write('{"row": 9')  # cut off
    assert poison_rows(tmp_path) == (7, 3)
    first, *_ = (tmp_path / "poison.jsonl").read_text().splitlines()
    assert json.loads(first)["time_s"] > 0
