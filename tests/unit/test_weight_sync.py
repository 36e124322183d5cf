"""The control side of a weight sync on scripted engines, and the Gloo group that carries it."""

from __future__ import annotations

import asyncio
import gc
import threading
import time

import pytest

from ray_apr.core.exceptions import (
    SYNC_BROKEN,
    EngineUnavailableError,
    RolloutError,
    SyncBrokenError,
    WeightSyncError,
)
from ray_apr.core.messages import SamplingParams
from ray_apr.core.sample import FinishReason
from ray_apr.weights.plan import ParamSpec
from ray_apr.weights.sync import WeightSync
from tests.fakes import ScriptedEngine, generate_request

LIMIT_S = 5.0


class RecordingEngine(ScriptedEngine):
    """Notes the order of the control verbs; weights arrive when the sender says so."""

    def __init__(self, **kwargs) -> None:
        super().__init__(**kwargs)
        self.verbs: list[str] = []
        self.sent = asyncio.Event()
        self.errors: dict[str, BaseException] = {}

    async def _note(self, verb: str) -> None:
        self.verbs.append(verb)
        if verb in self.errors:
            raise self.errors[verb]

    async def pause(self, mode) -> None:
        await super().pause(mode)
        await self._note(f"pause {mode}")

    async def receive_weights(self, policy_version: int, notice=b"", *, resume=False) -> None:
        await self._note("receive, go on" if resume else "receive")
        await self.sent.wait()
        await super().receive_weights(policy_version, notice, resume=resume)

    async def resume(self) -> None:
        await self._note("resume")
        await super().resume()


def make(mode="abort", timeout_s=LIMIT_S):
    engine = RecordingEngine()
    return engine, WeightSync(engine, pause_mode=mode, timeout_s=timeout_s)


@pytest.mark.parametrize("mode", ["abort", "keep"])
async def test_a_sync_pauses_receives_and_resumes(mode):
    engine, sync = make(mode)
    await sync.begin(1)
    assert engine.is_paused, "the sender may send: the engines are stopped"
    assert engine.policy_version == 0
    await asyncio.sleep(0)
    assert engine.verbs == [f"pause {mode}", "receive, go on"]
    engine.sent.set()
    times = await sync.finish()
    assert engine.verbs == [f"pause {mode}", "receive, go on", "resume"], "resumed by itself"
    assert engine.policy_version == 1
    assert not engine.is_paused
    parts = times.pause_s + times.receive_s + times.resume_s
    assert times.stopped_s == pytest.approx(parts)


async def test_engines_that_read_shared_weights_go_on_when_these_are_released():
    engine, sync = make()
    for version in (1, 2):
        engine.verbs.clear()
        await sync.begin(version, holds_device=True)
        reading = asyncio.create_task(sync.wait_until_received())
        await asyncio.sleep(0.01)
        assert not reading.done()
        engine.sent.set()
        await reading
        assert engine.verbs == ["pause abort", "receive"] and engine.is_paused
        await sync.finish()
        assert engine.verbs[-1] == "resume" and engine.policy_version == version
        engine.sent.clear()


async def test_shared_weights_that_cannot_be_read_or_are_never_released_end_the_sync():
    engine, sync = make(timeout_s=0.05)
    await sync.begin(1, holds_device=True)
    with pytest.raises(WeightSyncError, match="no weights within"):
        await sync.wait_until_received()
    engine.sent.set()
    await sync.begin(2, holds_device=True)
    await sync.wait_until_received()
    await asyncio.sleep(0.1)  # the trainer has died
    with pytest.raises(WeightSyncError, match="no weights within"):
        await sync.finish()
    assert not engine.is_paused


@pytest.mark.parametrize("then", ["finish", "begin", "nothing"])
async def test_after_an_error_engines_go_on_once_shared_weights_are_freed(then, caplog):
    """known fault: those that had theirs took the memory of weights that were still there."""
    engine, sync = make(timeout_s=0.2)
    engine.sent.set()
    engine.fail_next_sync = WeightSyncError("no train worker shares GPU-1")
    await sync.begin(1, holds_device=True)
    with pytest.raises(WeightSyncError, match="version 1: no train worker shares GPU-1"):
        await sync.wait_until_received()
    assert engine.is_paused and "resume" not in engine.verbs
    if then == "finish":
        with pytest.raises(WeightSyncError, match="no train worker shares GPU-1"):
            await sync.finish()
    elif then == "begin":
        await sync.begin(2, holds_device=True)
        await sync.wait_until_received()
        assert engine.is_paused and "resume" not in engine.verbs
        await sync.finish()
    else:  # the trainer has died
        await asyncio.sleep(0.3)
    assert not engine.is_paused
    del sync
    gc.collect()
    assert "never retrieved" not in caplog.text


async def test_syncs_follow_one_another():
    engine, sync = make()
    engine.sent.set()
    for version in (1, 2, 3):
        await sync.begin(version)
        await sync.finish()
    assert engine.policy_version == 3


async def test_what_runs_during_a_sync_keeps_its_tokens():
    engine, sync = make()
    call = asyncio.create_task(
        engine.generate(generate_request(
            request_id="s#0", session_id="g", token_ids=(1, 2), sampling=SamplingParams(),
            max_tokens=9,
        ))
    )  # fmt: skip
    await asyncio.sleep(0)
    engine.advance(3)
    await sync.begin(1)
    partial = await call
    assert (partial.finish_reason, partial.num_tokens) == (FinishReason.ABORT, 3)
    engine.sent.set()
    await sync.finish()


async def test_a_second_sync_cannot_begin_while_one_is_under_way():
    engine, sync = make()
    await sync.begin(1)
    with pytest.raises(WeightSyncError, match="under way; version 2 cannot begin"):
        await sync.begin(2)
    engine.sent.set()
    await sync.finish()
    assert engine.policy_version == 1


async def test_the_begin_of_a_sync_may_be_told_twice():
    """Who told it may not have heard the answer."""
    engine, sync = make()
    await sync.begin(1, b"notice")
    await sync.begin(1, b"notice")
    engine.sent.set()
    await sync.wait_until_received()
    assert (await sync.finish()) == (await sync.finish())
    assert engine.verbs == ["pause abort", "receive, go on", "resume"]


async def test_nothing_to_finish():
    _, sync = make()
    with pytest.raises(WeightSyncError, match="no sync is under way"):
        await sync.finish()


async def test_engines_that_cannot_be_paused_are_resumed_and_begin_says_why():
    engine, sync = make()
    engine.errors["pause abort"] = EngineUnavailableError("replica b is dead")
    with pytest.raises(SyncBrokenError, match="version 1: replica b is dead"):
        await sync.begin(1)
    assert engine.verbs == ["pause abort", "resume"]
    assert not engine.is_paused


@pytest.mark.parametrize("error", [RolloutError("peer closed"), ConnectionError(), OSError()])
async def test_weights_that_break_off_leave_no_engine_paused(error):
    engine, sync = make()
    engine.fail_next_sync = error
    await sync.begin(1)
    engine.sent.set()
    with pytest.raises(WeightSyncError, match=str(error) or type(error).__name__):
        await sync.finish()
    assert not engine.is_paused
    assert not engine.weights_valid, "it answers again only after a whole sync"
    await sync.begin(2)
    await sync.finish()
    assert (engine.policy_version, engine.weights_valid) == (2, True)


@pytest.mark.parametrize("error", [KeyError("model.norm"), WeightSyncError("other log-probs")])
async def test_an_error_that_would_come_again_is_not_one_to_try_again(error):
    engine, sync = make()
    engine.fail_next_sync = error
    engine.sent.set()
    await sync.begin(1)
    with pytest.raises(WeightSyncError, match=str(error)) as raised:
        await sync.finish()
    assert not isinstance(raised.value, SyncBrokenError)
    assert not engine.is_paused


async def test_a_resume_that_fails_is_a_failed_sync():
    engine, sync = make()
    engine.sent.set()
    engine.errors["resume"] = EngineUnavailableError("replica b is dead")
    await sync.begin(1)
    with pytest.raises(SyncBrokenError, match="could not be resumed: replica b is dead"):
        await sync.finish()


async def test_a_failed_resume_does_not_hide_why_the_sync_failed():
    engine, sync = make()
    engine.errors["resume"] = EngineUnavailableError("replica b is dead")
    engine.fail_next_sync = RolloutError("peer closed")
    engine.sent.set()
    await sync.begin(1)
    with pytest.raises(WeightSyncError, match=r"peer closed.*replica b is dead"):
        await sync.finish()


async def test_a_sync_whose_weights_never_come_ends_by_its_limit():
    engine, sync = make(timeout_s=0.05)
    await sync.begin(1)
    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(SyncBrokenError, match=r"no weights within 0\.05 s"):
            await sync.finish()
    assert not engine.is_paused


async def test_engines_go_on_by_themselves_when_nobody_finishes_the_sync(caplog):
    engine, sync = make(timeout_s=0.05)
    await sync.begin(1)
    async with asyncio.timeout(LIMIT_S):
        while engine.is_paused:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert "weight sync to version 1" in caplog.text
    engine.sent.set()
    await sync.begin(2)
    await sync.finish()
    assert engine.policy_version == 2


# -- the group that carries the weights ------------------------------------------------------------

torch = pytest.importorskip("torch")


def gloo_group(world_size: int, timeout_s: float = LIMIT_S):
    from ray_apr.weights.transports.gloo import open_rendezvous

    return gloo_endpoint(
        world_size=world_size, port=open_rendezvous(timeout_s), timeout_s=timeout_s
    )


def gloo_endpoint(**changes):
    from ray_apr.weights.transports.gloo import GlooEndpoint

    values = {
        "host": "127.0.0.1", "port": 1, "world_size": 2, "group_name": "test", "timeout_s": 0.5,
        "bucket_bytes": 1 << 20, "params": (ParamSpec("w", (3,), "float32"),),
    }  # fmt: skip
    return GlooEndpoint(**{**values, **changes})


def in_threads(group, body):
    """Run ``body(member, rank)`` as every member of a group; returns results or errors by rank."""
    from ray_apr.weights.collective import join

    results: dict[int, object] = {}

    def run(rank: int) -> None:
        member = join(group, rank)
        try:
            results[rank] = body(member, rank)
        except RuntimeError as error:
            results[rank] = error
        finally:
            member.destroy_group()

    threads = [threading.Thread(target=run, args=(r,)) for r in range(group.world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(4 * LIMIT_S)
    return results


def test_a_broadcast_reaches_all_members():
    from ray.util.collective import types

    def body(member, rank):
        tensor = torch.full((5,), float(rank + 1))
        member.broadcast([tensor], types.BroadcastOptions())
        total = torch.full((2,), float(rank + 1))
        member.allreduce([total])
        member.barrier()
        return tensor.tolist(), total.tolist()

    results = in_threads(gloo_group(3), body)
    assert results == {rank: ([1.0] * 5, [6.0] * 2) for rank in range(3)}


def test_a_member_that_leaves_is_an_error_for_the_others_and_no_hang():
    def body(member, rank):
        member.barrier()  # who leaves before all have come ends the meeting, which raises there
        if rank == 0:
            return None
        member.broadcast([torch.zeros(5)])

    begin = time.monotonic()
    results = in_threads(gloo_group(2), body)
    assert isinstance(results[1], RuntimeError)
    assert time.monotonic() - begin < 2 * LIMIT_S


def test_members_that_never_come_are_an_error_that_says_where():
    from ray_apr.weights.collective import join

    with pytest.raises(
        WeightSyncError, match=rf"{SYNC_BROKEN}: rank 0 of 2 could not join .*127\.0\.0\.1"
    ):
        join(gloo_group(2, timeout_s=0.5), 0)


def test_a_group_that_cannot_form_ends_for_all_members_as_soon_as_rank_0_says_so():
    """Without it they waited for a member that had died until the limit, with engines that stood
    still."""
    from ray_apr.weights.collective import join
    from ray_apr.weights.transports.gloo import close_rendezvous

    group = gloo_group(3, timeout_s=60.0)
    errors: list[WeightSyncError] = []

    def wait_for_rank_2(rank: int) -> None:
        try:
            join(group, rank)
        except SyncBrokenError as error:
            errors.append(error)

    threads = [threading.Thread(target=wait_for_rank_2, args=(r,), daemon=True) for r in (0, 1)]
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    close_rendezvous(group.port)
    for thread in threads:
        thread.join(LIMIT_S)
    assert len(errors) == 2


def test_a_rendezvous_that_is_gone_is_an_error():
    from ray_apr.weights.collective import join

    with pytest.raises(WeightSyncError, match=r"rank 1 of 2 could not join .*127\.0\.0\.1:1"):
        join(gloo_endpoint(), 1)


def test_a_backend_that_is_missing_is_named():
    from ray_apr.weights.collective import join
    from ray_apr.weights.transports.gloo import GlooEndpoint

    class OtherEndpoint(GlooEndpoint):
        backend = "APR_OTHER"

    other = OtherEndpoint(
        host="127.0.0.1", port=1, world_size=1, group_name="test", timeout_s=0.5, bucket_bytes=1,
        params=(),
    )  # fmt: skip
    with pytest.raises(WeightSyncError, match="APR_OTHER is not available"):
        join(other, 0)
