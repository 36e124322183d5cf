"""Samples of trained steps on their way to the run folder (data/kept_samples.py)."""

from __future__ import annotations

import asyncio
import logging
import types

import pytest
from ray.exceptions import ActorDiedError, ObjectLostError, RayTaskError

from ray_apr.config import BufferConfig, TrainConfig
from ray_apr.core.exceptions import ConfigError, ResourceError
from ray_apr.data.buffer import SampleBuffer
from ray_apr.data.kept_samples import KeptSamples, is_kept
from tests.unit.test_buffer import FakeRecorder, put


class SlowRecorder(FakeRecorder):
    """Writes as many steps as it may, and fails with an error if it has one."""

    def __init__(self, may_write: int = 99) -> None:
        super().__init__()
        self.save_samples = types.SimpleNamespace(remote=self._save)
        self.begun: list[tuple] = []
        self.may_write = asyncio.Semaphore(may_write)
        self.error: Exception | None = None

    def _save(self, rows, *refs) -> asyncio.Task:
        self.begun.append(({row["step"] for row in rows}, refs))
        return asyncio.ensure_future(self._end())

    async def _end(self) -> None:
        await self.may_write.acquire()
        if self.error is not None:
            raise self.error


def make(recorder, share=1.0) -> SampleBuffer:
    return SampleBuffer(
        batch_size=4, max_staleness=9, num_ranks=1, micro_batch_tokens=64, save_samples=share,
        config=BufferConfig(poll_timeout_s=0.05), recorder=recorder,
    )  # fmt: skip


async def train(buffer, step) -> None:
    for name in (f"{step}a", f"{step}b"):
        await put(buffer, name, step)
    await buffer.grant(step, step)
    assert (await buffer.take(0, None if step == 0 else step - 1)).plan.step == step
    await buffer.ack(step)


async def test_a_step_is_a_step_behind_at_most_and_the_end_waits_for_the_last_one():
    recorder = SlowRecorder(may_write=0)
    buffer = make(recorder)
    await train(buffer, 0)
    assert recorder.begun == [({0}, ("ref-0a", "ref-0b"))]
    second = asyncio.create_task(train(buffer, 1))
    await asyncio.sleep(0.05)
    assert not second.done() and len(recorder.begun) == 1
    recorder.may_write.release()
    await second
    assert [steps for steps, _ in recorder.begun] == [{0}, {1}]
    await buffer.close()
    end = asyncio.create_task(buffer.finish_samples())
    await asyncio.sleep(0.05)
    assert not end.done()
    recorder.may_write.release()
    await end


async def test_without_a_share_nothing_is_handed_over():
    recorder = SlowRecorder()
    buffer = make(recorder, share=0.0)
    await train(buffer, 0)
    await buffer.finish_samples()
    assert not recorder.begun


async def test_a_part_of_the_groups_is_handed_over():
    recorder = SlowRecorder()
    buffer = make(recorder, share=0.5)
    for step in range(20):
        await train(buffer, step)
    refs = [ref for _, refs in recorder.begun for ref in refs]
    expected = [f"ref-{step}{n}" for step in range(20) for n in "ab" if is_kept(f"{step}{n}", 0.5)]
    assert refs == expected and 10 < len(refs) < 30


@pytest.mark.parametrize(
    "error",
    [
        ActorDiedError(),
        ObjectLostError("0" * 56, None, ""),
        RayTaskError("f", "", ObjectLostError("0" * 56, None, "")).as_instanceof_cause(),
    ],
)
async def test_texts_that_died_with_a_process_end_no_run(caplog, error):
    recorder = SlowRecorder()
    recorder.error = error
    buffer = make(recorder)
    with caplog.at_level(logging.WARNING):
        await train(buffer, 0)
        await train(buffer, 1)
    assert "the texts of a trained step are lost" in caplog.text


async def test_texts_that_cannot_be_written_end_the_run():
    kept = KeptSamples(recorder := SlowRecorder(), 1.0)
    full = ResourceError("samples/step-000000.parquet cannot be written")
    recorder.error = RayTaskError("f", str(full), full).as_instanceof_cause()
    kept._writing = recorder._save([{"step": 0}])
    with pytest.raises(ResourceError, match="cannot be written"):
        await kept.finish()
    await kept.finish()


@pytest.mark.parametrize("value", [-0.1, 1.5, True, "all", None])
def test_the_share_is_obeyed_or_refused(value):
    with pytest.raises(ConfigError, match=r"train\.save_samples .*from 0 to 1"):
        TrainConfig(save_samples=value)
