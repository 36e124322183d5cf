"""The buffer actor's class, run in this process (data/buffer.py)."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from ray_apr.config import BufferConfig, PartialRolloutConfig
from ray_apr.core.exceptions import APRError, ResourceError, RolloutError, StarvedError
from ray_apr.core.group import SampleMeta
from ray_apr.core.sample import FinishReason
from ray_apr.data.buffer import SampleBuffer
from ray_apr.data.journal import JournalFolder
from ray_apr.data.movement import Moves
from ray_apr.data.resumption import Replayed
from ray_apr.scheduling import stock as stock_module
from ray_apr.scheduling.orders import Order, OrderKind
from ray_apr.scheduling.scheduler import Scheduler


class FakeRecorder:
    """Keeps the rows; `.record_many.remote(...)` as a Ray handle has it."""

    def __init__(self) -> None:
        self.rows: list[dict] = []
        self.record_many = self

    async def remote(self, kind, rows) -> None:
        self.rows += [{"kind": kind, **row} for row in rows]


def make(
    *, batch_size=4, max_staleness=1, on_stale="evict", num_ranks=1, recorder=None, journal=None,
    num_steps=None, replayed=None, **config,
):  # fmt: skip
    recorder = recorder or FakeRecorder()
    buffer = SampleBuffer(
        batch_size=batch_size,
        max_staleness=max_staleness,
        on_stale=on_stale,
        num_ranks=num_ranks,
        micro_batch_tokens=64,
        num_steps=num_steps,
        config=BufferConfig(**{"poll_timeout_s": 0.05, **config}),
        recorder=recorder,
        journal=journal,
        replayed=replayed,
    )
    return buffer, recorder


def meta(name, i, version_tokens):
    versions = [version for version, _ in version_tokens]
    return SampleMeta(
        sample_id=f"{name}-{i}", group_id=name, num_prompt_tokens=2,
        num_tokens=sum(tokens for _, tokens in version_tokens),
        oldest_version=versions[0], newest_version=versions[-1], reward=float(i),
        finish_reason=FinishReason.STOP, num_interruptions=len(versions) - 1,
        version_tokens=tuple(version_tokens),
    )  # fmt: skip


def group(name, version, size=2, num_tokens=3):
    return [meta(name, i, [(version, num_tokens)]) for i in range(size)]


async def put(buffer, name, version, **kwargs):
    await buffer.put_group(group(name, version, **kwargs), [f"ref-{name}"])


async def test_no_batch_before_the_grant_and_the_chosen_one_is_of_the_granted_version():
    buffer, _ = make()
    for name, version in (("a", 0), ("b", 0), ("c", 1), ("d", 2)):
        await put(buffer, name, version)
    assert await buffer.take(0, None) is None, "nothing was granted yet"
    await buffer.grant(2, 2)
    ticket = await buffer.take(0, None)
    assert ticket.plan.step == 2
    assert ticket.refs == ("ref-c", "ref-d"), "a and b are two versions old: beyond the bound of 1"
    stats = await buffer.stats()
    assert (stats.evicted_samples, stats.buffered_samples) == (4, 4)
    assert stats.ledger.discarded["stale"] == 12


async def test_a_wait_ends_as_soon_as_the_batch_is_complete():
    buffer, _ = make(poll_timeout_s=5.0)
    await buffer.grant(0, 0)
    waiting = asyncio.create_task(buffer.take(0, None))
    await put(buffer, "a", 0)
    await asyncio.sleep(0)
    assert not waiting.done()
    await put(buffer, "b", 0)
    assert (await asyncio.wait_for(waiting, 1.0)).plan.group_numbers == (0, 0, 1, 1)


async def test_ack_counts_what_was_trained_and_records_a_row_for_each_sample():
    buffer, recorder = make()
    await put(buffer, "a", 0)
    await put(buffer, "b", 1)
    await buffer.grant(1, 1)
    await buffer.take(0, None)
    await buffer.ack(1)
    stats = await buffer.stats()
    assert (stats.trained_samples, stats.ledger.trained, stats.buffered_samples) == (4, 12, 0)
    assert [row["staleness"] for row in recorder.rows] == [1, 1, 0, 0]
    assert {row["kind"] for row in recorder.rows} == {"sample"}
    assert await buffer.ack(1) == {"num_turns": 4}, "who asks again has not heard of it"
    assert len(recorder.rows) == 4
    with pytest.raises(APRError, match="step 2 was trained"):
        await buffer.ack(2)


async def test_ack_and_the_next_grant_are_one_call():
    buffer, _ = make()
    for name in "abcd":
        await put(buffer, name, 0)
    await buffer.grant(0, 0)
    await buffer.take(0, None)
    await buffer.ack(0, 1)
    ticket = await buffer.take(0, 0)
    assert (ticket.plan.step, ticket.plan.policy_version) == (1, 1)
    assert (await buffer.stats()).trained_samples == 4


async def test_every_rank_gets_the_same_step_once_and_read_ahead_stays_one_batch():
    """The batch of the next step is there while this one trains, and no later one."""
    buffer, _ = make(num_ranks=2)
    for name in "abcdefgh":
        await put(buffer, name, 0)
    await buffer.grant(0, 0)
    first, second = [await buffer.take(rank, None) for rank in (0, 1)]
    assert first == second and first.plan is second.plan
    ahead = await buffer.take(0, 0)
    assert (ahead.plan.step, ahead.plan.policy_version, ahead.plan.oldest_version) == (1, 1, 0)
    assert await buffer.take(0, 1) is None, "step 2 is two ahead"
    await buffer.ack(0)
    await buffer.grant(1, 1)
    assert await buffer.take(1, 0) == ahead
    assert (await buffer.stats()).read_ahead_max == 8


async def test_a_batch_ahead_is_of_the_version_that_trains_it():
    """What is within the bound now, and will not be at the next step, is not in its batch."""
    buffer, _ = make()
    for name, version in (("a", 4), ("b", 4), ("c", 4), ("d", 5), ("e", 5)):
        await put(buffer, name, version)
    await buffer.grant(5, 5)
    assert (await buffer.take(0, None)).refs == ("ref-a", "ref-b")
    assert (await buffer.take(0, 5)).refs == ("ref-d", "ref-e")
    stats = await buffer.stats()
    assert (stats.evicted_samples, stats.buffered_samples) == (2, 8), "c is too old for step 6"
    await buffer.ack(5, 6)
    await buffer.ack(6, 7)
    stats = await buffer.stats()
    assert (stats.trained_samples, stats.buffered_samples) == (8, 0)


async def test_after_the_last_step_no_batch_is_chosen():
    buffer, _ = make(num_steps=2)
    for name in "abcdef":
        await put(buffer, name, 0)
    await buffer.grant(0, 0)
    for last_step in (None, 0):
        assert (await buffer.take(0, last_step)).plan is not None
    assert await buffer.take(0, 1) is None
    await buffer.ack(0, 1)
    await buffer.ack(1)
    stats = await buffer.stats()
    assert (stats.buffered_samples, stats.evicted_samples, stats.held_groups) == (4, 0, ("e", "f"))


async def test_a_batch_that_was_ahead_comes_back_with_that_before_it():
    buffer, _ = make(max_staleness=2)
    for name in "abcd":
        await put(buffer, name, 0)
    await buffer.grant(0, 0)
    await buffer.take(0, None, reader="one")
    assert (await buffer.stats()).held_groups == tuple("abcd")
    assert (await buffer.watch(-1)).num_buffered == 8
    await buffer.grant(0, 0)  # it has not heard the answer
    assert (await buffer.take(0, 0, reader="one")).refs == ("ref-c", "ref-d")
    await buffer.grant(1, 1)  # a trainer that begins again
    assert (await buffer.take(0, None, reader="other")).refs == ("ref-a", "ref-b")
    await buffer.close()
    stats = await buffer.stats()
    assert (stats.held_groups, stats.trained_samples) == (tuple("abcd"), 0)


async def test_a_reader_that_ray_data_starts_again_is_refused():
    """It would begin with the next step, and the trainer wait for the one that is lost."""
    buffer, _ = make(num_ranks=2)
    for name in "abcd":
        await put(buffer, name, 0)
    await buffer.grant(0, 0)
    await buffer.take(1, None, reader="first")
    ticket = await buffer.take(1, None, reader="first")  # it has not heard the answer
    assert ticket.plan.step == 0
    with pytest.raises(ResourceError, match="train worker 1 has died"):
        await buffer.take(1, None, reader="second")
    with pytest.raises(ResourceError, match="train worker 1 has died"):
        await buffer.take(0, 0)
    assert "train worker 1 has died" in str(await buffer.failure()), "the run's own reason"


async def test_every_rank_is_told_once_to_send_its_weights_again_before_the_batch():
    buffer, _ = make(num_ranks=2)
    assert not await buffer.send_again(0), "no trainer waits"
    await buffer.grant(0, 0)
    waiting = asyncio.create_task(buffer.take(0, None))
    await asyncio.sleep(0)
    assert await buffer.send_again(0)
    told = (Order(OrderKind.SEND_WEIGHTS, 0, 0),)
    assert (await waiting).order == told[0]
    for name in "ab":
        await put(buffer, name, 0)
    assert not await buffer.send_again(0), "the trainer has its batch, and sends after the step"
    assert (await buffer.take(0, None, told)).plan.step == 0
    ticket = await buffer.take(1, None)
    assert (ticket.order, ticket.plan) == (told[0], None)
    assert (await buffer.take(1, None, told)).plan.step == 0
    await buffer.ack(0, 1)
    assert await buffer.send_again(1)
    for rank in (0, 1):
        assert (await buffer.take(rank, 0, told)).order == Order(OrderKind.SEND_WEIGHTS, 1, 1)


async def test_every_rank_is_told_of_a_checkpoint_between_the_same_two_batches():
    buffer, _ = make(num_ranks=2)
    assert await buffer.order_checkpoint() is None, "there is no trainer"
    await buffer.grant(0, 0)
    for name in "ab":
        await put(buffer, name, 0)
    assert (await buffer.take(0, None)).plan.step == 0
    assert await buffer.order_checkpoint() == 1, "rank 0 has the batch before"
    ordered = Order(OrderKind.CHECKPOINT, 1)
    assert (await buffer.take(0, 0)).order == ordered, "before the next grant"
    assert (await buffer.take(1, None)).plan.step == 0, "first, as on rank 0"
    assert (await buffer.take(1, 0)).order == ordered
    await buffer.ack(0, 1)
    assert await buffer.order_checkpoint() == 1, "nobody has its batch"
    for name in "cd":
        await put(buffer, name, 1)
    for rank in (0, 1):
        assert (await buffer.take(rank, 0, (ordered,))).order == ordered
        assert (await buffer.take(rank, 0, (ordered, ordered))).plan.step == 1


async def test_a_checkpoint_comes_after_a_batch_that_a_rank_has_ahead():
    buffer, _ = make(num_ranks=2)
    for name in "abcd":
        await put(buffer, name, 0)
    await buffer.grant(0, 0)
    for last_step in (None, 0):
        await buffer.take(0, last_step)
    assert await buffer.order_checkpoint() == 2
    assert [(await buffer.take(1, last)).plan.step for last in (None, 0)] == [0, 1]
    for rank in (0, 1):
        assert (await buffer.take(rank, 1)).order == Order(OrderKind.CHECKPOINT, 2)


async def test_a_reader_gets_the_batch_ahead_when_it_is_due(monkeypatch):
    """Nothing else happens then: no group comes, no step ends."""
    monkeypatch.setattr(stock_module, "LEAD_S", -0.1)
    buffer, _ = make(poll_timeout_s=30.0)
    for name in "abcd":
        await put(buffer, name, 0)
    await buffer.grant(0, 0)
    await buffer.take(0, None)
    assert not buffer._stock.next_batch(0)
    assert (await asyncio.wait_for(buffer.take(0, 0), 10.0)).plan.step == 1


async def test_a_buffer_that_follows_tells_all_ranks_what_the_last_one_told_some():
    buffer, _ = make(num_ranks=2)
    await buffer.grant(3, 3)
    told = (Order(OrderKind.SEND_WEIGHTS, 2, 2), Order(OrderKind.CHECKPOINT, 3))
    assert await buffer.take(0, 2, told) is None
    assert (await buffer.take(1, 2, told[:1])).order == told[1]
    assert await buffer.take(1, 2, told) is None


async def test_a_buffer_that_follows_puts_an_order_behind_a_batch_that_a_rank_may_have():
    plan = {3: ("a", "b")}
    buffer, _ = make(num_ranks=2)
    buffer._stock.go_on(plan)
    await buffer.grant(3, 3)
    assert not await buffer.send_again(3)
    assert await buffer.order_checkpoint() == 4
    assert await buffer.take(1, 2) is None
    assert (await buffer.take(0, 3)).order == Order(OrderKind.CHECKPOINT, 4)


async def test_a_trainer_that_begins_again_is_told_nothing_of_before():
    buffer, _ = make()
    await buffer.grant(3, 3)
    assert await buffer.send_again(3)
    await buffer.grant(2, 2)
    assert await buffer.take(0, None) is None


async def test_the_rollout_side_follows_counts_that_cannot_be_lost():
    buffer, _ = make(poll_timeout_s=5.0)
    state = await buffer.watch(-1)
    await put(buffer, "a", 0)
    state = await asyncio.wait_for(buffer.watch(state.cursor), 1.0)
    assert (state.num_received, state.num_buffered, state.trainer_version) == (2, 2, None)
    await put(buffer, "b", 0)
    await buffer.grant(0, 0)
    await buffer.ack(0)
    state = await asyncio.wait_for(buffer.watch(state.cursor), 1.0)
    assert (state.num_received, state.num_buffered, state.trainer_version) == (4, 0, 1)


async def test_a_starved_trainer_learns_what_the_rollout_side_waits_for():
    buffer, _ = make(wait_timeout_s=0.05)
    await put(buffer, "a", 0)
    await buffer.grant(7, 0)
    await asyncio.sleep(0.06)
    assert await buffer.take(0, None) is None, "the servers' start has a limit of its own"
    await buffer.report_rollout("3 of 8 groups wait for reward", Moves())
    with pytest.raises(StarvedError, match=r"step 7 .* 2 of 4 .* 3 of 8 groups wait for reward"):
        await buffer.take(0, None)
        await buffer.take(0, None)


async def test_a_short_limit_of_the_wait_for_a_batch_is_kept_within_one_call():
    """known fault: `wait_timeout_s` below `poll_timeout_s` was looked at once that was over."""
    buffer, _ = make(wait_timeout_s=0.2, poll_timeout_s=60.0)
    await buffer.grant(0, 0)
    await buffer.report_rollout("nothing", Moves())
    with pytest.raises(StarvedError, match=r"for 0\.2 s \(buffer\.wait_timeout_s\)"):
        async with asyncio.timeout(10.0):
            while await buffer.take(0, None) is None:
                pass


async def test_a_batch_is_waited_for_while_tokens_rewards_or_engines_move():
    """300 s after its grant a run ended, however well it did."""
    buffer, _ = make(wait_timeout_s=0.5)
    await buffer.grant(0, 0)
    for i in range(12):
        kind = ("tokens", "rewards", "engines")[i % 3]
        await buffer.report_rollout("slow", Moves(**{kind: i + 1}))
        assert await buffer.take(0, None) is None
    await asyncio.sleep(0.5)
    with pytest.raises(StarvedError, match=r"for 0.5 s \(buffer.wait_timeout_s\): last token"):
        await buffer.take(0, None)
        await buffer.take(0, None)


async def test_what_rewards_told_is_summed_up_over_the_whole_batch():
    """Reward parts were read nowhere."""
    buffer, recorder = make(num_ranks=2)
    told = [{"form": 1.0, "length": -0.5}, {"form": 0.0}, {}, {"form": 0.5}]
    for name, metrics in (("a", told[:2]), ("b", told[2:])):
        samples = [
            dataclasses.replace(sample, reward_metrics=found, num_turns=3 if name == "a" else 1)
            for sample, found in zip(group(name, 0), metrics, strict=True)
        ]
        await buffer.put_group(samples, [f"ref-{name}"])
    await buffer.grant(0, 0)
    await buffer.take(0, None)
    assert await buffer.ack(0, 1) == {
        "num_turns": 8,
        "reward/form_mean": 0.5, "reward/form_min": 0.0, "reward/form_max": 1.0,
        "reward/length_mean": -0.5, "reward/length_min": -0.5, "reward/length_max": -0.5,
    }  # fmt: skip
    assert [row["reward_metrics"] for row in recorder.rows] == told


async def test_a_failure_of_the_rollout_side_reaches_every_reader():
    buffer, _ = make(poll_timeout_s=5.0)
    waiting = asyncio.create_task(buffer.take(0, None))
    await asyncio.sleep(0)
    await buffer.fail(RolloutError("32 rewards failed in a row"))
    with pytest.raises(RolloutError, match="32 rewards"):
        await asyncio.wait_for(waiting, 1.0)
    with pytest.raises(RolloutError, match="32 rewards"):
        await buffer.take(1, None)


async def test_close_ends_the_streams():
    buffer, _ = make(poll_timeout_s=5.0)
    waiting = asyncio.create_task(buffer.take(0, None))
    await asyncio.sleep(0)
    await buffer.close()
    assert (await asyncio.wait_for(waiting, 1.0)).plan is None


async def test_a_group_comes_in_once_however_often_it_is_told():
    """Who puts it asks again where it has not heard the answer, as a connection broke."""
    buffer, _ = make(max_staleness=0, num_steps=2)
    for name, version in (("a", 1), ("b", 1), ("c", 0), ("d", 1)):
        for _ in range(2):
            await put(buffer, name, version)
    with pytest.raises(RolloutError, match="group a is in the buffer, with other samples"):
        await put(buffer, "a", 2)
    await buffer.grant(1, 1)
    assert (await buffer.take(0, None)).refs == ("ref-a", "ref-b")
    for trained in (False, True):
        for name in "abcd":
            await put(buffer, name, 0 if name == "c" else 1)
        stats = await buffer.stats()
        assert stats.buffered_samples == (2 if trained else 6)
        assert (stats.evicted_samples, stats.ledger.discarded["stale"]) == (2, 6)
        await buffer.ack(1)
    assert (await buffer.watch(-1)).num_received == 8


async def test_a_step_that_is_acknowledged_again_while_the_first_call_runs_counts_once():
    """known fault: the second call found the step's batch gone, and ended the run."""
    buffer, recorder = make()
    record, may_go = recorder.remote, asyncio.Event()

    async def slowly(kind, rows):
        await may_go.wait()
        await record(kind, rows)

    recorder.remote = slowly
    for name in "abcd":
        await put(buffer, name, 0)
    await buffer.grant(0, 0)
    await buffer.take(0, None)
    acks = [asyncio.create_task(buffer.ack(0, 1)) for _ in range(3)]
    await asyncio.sleep(0.01)
    may_go.set()
    assert await asyncio.gather(*acks) == [{"num_turns": 4}] * 3
    assert (await buffer.take(0, 0)).plan.step == 1
    assert (await buffer.stats()).trained_samples == 4 and len(recorder.rows) == 4


def taken_over(plan, *, granted, policy_version) -> Replayed:
    return Replayed(
        plan=plan, policy_version=policy_version, goes_on_at=policy_version, takes_over=True,
        granted=granted, trained=(granted[0] - 1, {}), ended=(), dropped=(),
    )  # fmt: skip


async def test_the_end_of_a_step_is_told_again_while_its_groups_are_on_their_way():
    """known fault: the call waited for them, and the trainer for no longer than a minute."""
    replayed = taken_over({6: ("a", "b")}, granted=(6, 6), policy_version=6)
    buffer, recorder = make(replayed=replayed)
    async with asyncio.timeout(5):
        for name in "ab":
            assert await buffer.ack(6, 7) is None
            await put(buffer, name, 6)
        assert await buffer.ack(6, 7) == {"num_turns": 4}
    assert len(recorder.rows) == 4


async def test_a_buffer_that_follows_in_a_sync_knows_how_far_the_trainer_is():
    """known fault: it took the engines' version for it, and in mode sync a batch was generated
    under the weights of before, to be evicted."""
    buffer, _ = make(replayed=taken_over({}, granted=(7, 7), policy_version=6), max_staleness=0)
    state = await buffer.watch(-1)
    assert state.trainer_version == 7
    config = PartialRolloutConfig.preset("sync")
    scheduler = Scheduler(
        config, batch_size=4, group_size=2, max_inflight=99, budgets=lambda prompt: [9],
        policy_version=6,
    )  # fmt: skip
    scheduler.on_buffer_counts(
        num_buffered=state.num_buffered,
        num_received=state.num_received,
        trainer_version=state.trainer_version,
    )
    assert scheduler.room().num_groups == 0
    scheduler.on_version(7)
    assert scheduler.room().num_groups == 2


@pytest.mark.parametrize("why", ["failed", "starved"])
async def test_the_end_of_a_step_whose_groups_do_not_come_says_why(why):
    replayed = taken_over({6: ("a", "b")}, granted=(6, 6), policy_version=6)
    buffer, _ = make(replayed=replayed, wait_timeout_s=0.05)
    if why == "failed":
        await buffer.fail(RolloutError("engine-0 does not answer"))
    else:
        await buffer.report_rollout("2 groups wait for reward", Moves())
        await asyncio.sleep(0.1)
    expected = {
        "failed": (RolloutError, "engine-0 does not answer"),
        "starved": (StarvedError, r"nothing has moved for 0\.05 s"),
    }
    error, said = expected[why]
    async with asyncio.timeout(5):
        with pytest.raises(error, match=said):
            await buffer.ack(6, 7)


async def test_a_buffer_that_dies_as_it_records_a_step_has_not_counted_it(tmp_path):
    """known fault: a frame of that moment had the tokens as trained, and not the step's end: the
    next buffer trained and counted them once more."""
    folder = JournalFolder.of(f"{tmp_path}/journal")
    recorder = FakeRecorder()
    record, may_go = recorder.remote, asyncio.Event()
    buffer, _ = make(recorder=recorder, journal=folder)
    for name in "ab":
        await put(buffer, name, 0)
    await buffer.grant(0, 0)
    await buffer.take(0, None)

    async def slowly(kind, rows):
        await may_go.wait()
        await record(kind, rows)

    recorder.remote = slowly
    acked = asyncio.create_task(buffer.ack(0))
    await asyncio.sleep(0.01)
    await buffer._notes.flush()  # another rank's `take`, say
    notes = [frame.notes for frame in folder.frames(0, "buffer")]
    assert notes[-1]["state"]["counters"]["samples_trained"] == 0
    may_go.set()
    await acked
    notes = [frame.notes for frame in folder.frames(0, "buffer")]
    assert notes[-1]["state"]["counters"]["samples_trained"] == 4
    assert any("trained" in event for event in notes[-1]["events"])


async def test_masked_tokens_of_a_trained_group_are_discarded_and_not_trained():
    buffer, recorder = make(on_stale="mask")
    long = [meta("a", 0, [(1, 10), (4, 5), (5, 2)]), meta("a", 1, [(1, 3)])]
    await buffer.put_group(long, ["ref-a"])
    await put(buffer, "b", 5)
    await buffer.grant(5, 5)
    ticket = await buffer.take(0, None)
    assert ticket.refs == ("ref-a", "ref-b"), "old tokens do not cost the group its turn"
    assert ticket.plan.oldest_version == 4
    assert (await buffer.stats()).ledger.buffered == 26
    await buffer.ack(5)
    stats = await buffer.stats()
    ledger = stats.ledger
    assert (ledger.trained, ledger.discarded["masked"], ledger.discarded["stale"]) == (13, 13, 0)
    assert (stats.trained_samples, ledger.buffered) == (4, 0)
    rows = {row["sample_id"]: row for row in recorder.rows}
    assert [rows[i]["num_masked_tokens"] for i in ("a-0", "a-1", "b-0")] == [10, 3, 0]
    assert [rows[i]["staleness"] for i in ("a-0", "a-1", "b-0")] == [1, None, 0]


async def test_mask_evicts_a_group_without_any_young_token():
    buffer, _ = make(on_stale="mask")
    for name, version in (("a", 1), ("b", 5), ("c", 5)):
        await put(buffer, name, version)
    await buffer.grant(5, 5)
    assert (await buffer.take(0, None)).refs == ("ref-b", "ref-c")
    assert (await buffer.stats()).evicted_samples == 2


@pytest.mark.parametrize("comes", [True, False])
async def test_wait_leaves_no_unfinished_group_behind_that_would_expire(comes):
    buffer, _ = make(on_stale="wait", wait_timeout_s=0.01)
    for name in "bc":
        await put(buffer, name, 1)
    await buffer.report_unfinished({0: 2})
    await buffer.grant(1, 1)
    assert await buffer.take(0, None) is None, "version 0 is trained now or never"
    if not comes:
        await buffer.report_rollout("2 samples in flight", Moves())
        await asyncio.sleep(0.02)
        starved = r"older ones come first; unfinished by version: {0: 2}"
        for _ in range(2):
            with pytest.raises(StarvedError, match=starved):
                await buffer.take(0, None)
        assert isinstance(await buffer.failure(), StarvedError), "whoever asks learns it"
        return
    await put(buffer, "a", 0)
    await buffer.report_unfinished({})
    assert (await buffer.take(0, None)).refs == ("ref-a", "ref-b")


async def test_a_report_of_what_is_unfinished_chooses_again():
    buffer, _ = make(on_stale="wait", poll_timeout_s=5.0)
    await buffer.report_unfinished({0: 2})
    for name in "bc":
        await put(buffer, name, 1)
    await buffer.grant(1, 1)
    waiting = asyncio.create_task(buffer.take(0, None))
    await asyncio.sleep(0)
    assert not waiting.done()
    await buffer.report_unfinished({})  # dropped, e.g. as its reward failed
    assert (await asyncio.wait_for(waiting, 1.0)).refs == ("ref-b", "ref-c")


async def test_what_is_unfinished_still_is_no_change():
    """known fault: worker and buffer told each other so without an end."""
    buffer, _ = make(on_stale="wait")
    await buffer.report_unfinished({0: 2})
    state = await buffer.watch(-1)
    await buffer.report_unfinished({0: 2})
    assert (await buffer.watch(-1)).cursor == state.cursor
    await buffer.report_unfinished({0: 1})
    assert (await buffer.watch(-1)).cursor == state.cursor + 1


async def test_a_step_that_is_granted_twice_keeps_its_batch():
    buffer, _ = make(num_steps=2)
    for name in "bc":
        await put(buffer, name, 1)
    await buffer.grant(1, 1)
    await put(buffer, "a", 0)
    await buffer.grant(1, 1)  # the answer to the first grant was lost
    assert (await buffer.take(0, None)).refs == ("ref-b", "ref-c")
    await buffer.ack(1)
    stats = await buffer.stats()
    assert (stats.trained_samples, stats.buffered_samples) == (4, 2)


@pytest.mark.parametrize("arrival", ["abcd", "dbca"])
async def test_the_order_of_a_batch_does_not_depend_on_who_came_first(arrival):
    buffer, _ = make(batch_size=8)
    for name in arrival:
        await put(buffer, name, 0)
    await buffer.grant(0, 0)
    ticket = await buffer.take(0, None)
    assert ticket.refs == ("ref-a", "ref-b", "ref-c", "ref-d")
    assert [g.group_id for g in ticket.plan.groups] == list("abcd")


async def test_a_rank_gets_the_groups_that_its_row_needs():
    buffer, _ = make(num_ranks=2)
    for name in "ab":
        await put(buffer, name, 0)
    await buffer.grant(0, 0)
    for rank in (0, 1):
        ticket = await buffer.take(rank, None)
        wanted = ticket.plan.groups_of(rank)
        assert [i for i, ref in enumerate(ticket.refs) if ref is not None] == list(wanted)
        assert all(ticket.refs[i] == f"ref-{'ab'[i]}" for i in wanted)
