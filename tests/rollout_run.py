"""A rollout worker with a scripted engine and the real buffer, in one event loop, without Ray."""

from __future__ import annotations

import asyncio
import contextlib

import pyarrow as pa
import ray

from ray_apr.config import BufferConfig, PartialRolloutConfig, RolloutConfig
from ray_apr.core.exceptions import RewardError
from ray_apr.core.user import RewardResult
from ray_apr.data.buffer import SampleBuffer
from ray_apr.data.prompts import TOKEN_IDS, PromptSource
from ray_apr.data.store import opened
from ray_apr.rollout import engines as engines_module
from ray_apr.rollout import sessions as sessions_module
from ray_apr.rollout import worker as worker_module
from ray_apr.rollout.worker import RolloutWorker
from tests.fakes import RayMetrics

PROMPTS = pa.table({"prompt": ["a", "b", "c"], TOKEN_IDS: [[1, 2], [3], [4, 5, 6]]})


class Handle:
    """An object as its Ray handle: ``handle.method.remote(...)`` is the coroutine."""

    def __init__(self, target) -> None:
        self._target = target

    def __getattr__(self, name):
        return type("Method", (), {"remote": staticmethod(getattr(self._target, name))})


class Recorder:
    def __init__(self) -> None:
        self.rows: list[dict] = []

    async def record(self, kind, row) -> None:
        self.rows.append({"kind": kind, **row})

    async def record_many(self, kind, rows) -> None:
        self.rows += [{"kind": kind, **row} for row in rows]

    async def record_evaluation(self, row, samples) -> None:
        await self.record_many("evaluation_sample", samples)
        await self.record("evaluation", row)

    async def last_evaluation(self) -> dict:
        return next((row for row in self.rows[::-1] if row["kind"] == "evaluation"), {})


class Scorer:
    """Rewards at once; `bad` names samples whose reward fails for good, `by_sample` their size."""

    mean_reward_s = 0.25

    def __init__(self, bad=(), by_sample=None) -> None:
        self.bad = set(bad)
        self.by_sample = by_sample or {}
        self.texts: list[str] = []

    async def score(self, sample):
        self.texts.append(sample.response_text)
        if sample.sample_id in self.bad or "all" in self.bad:
            raise RewardError(sample.sample_id, "raised", "no judge")
        return RewardResult(reward=self.by_sample.get(sample.sample_id, 1.0))

    def take_spans(self):
        return []

    def close(self) -> None:
        pass


class Tokenizer:
    def decode(self, ids, skip_special_tokens):
        return " ".join(map(str, ids))


class Run:
    """A worker, a buffer and an engine, in one event loop."""

    def __init__(
        self,
        engine,
        *,
        scorer=None,
        batch_size=4,
        rollout=None,
        buffer=None,
        turns=None,
        poison=(),
        prompts=PROMPTS,
        group_filter=None,
        policy_version=0,
        make_state=None,
        position=0,
        pending=(),
        journal=None,
        before=None,
        **partial,
    ) -> None:
        self.engine = engine
        self.scorer = scorer or Scorer()
        self.recorder = Recorder()
        partial_config = PartialRolloutConfig(
            **{"max_inflight": None, "on_stale": "evict", **partial}
        )
        self.buffer = SampleBuffer(
            batch_size=batch_size, max_staleness=partial_config.max_staleness,
            on_stale=partial_config.on_stale, num_ranks=1, micro_batch_tokens=64,
            config=buffer or BufferConfig(poll_timeout_s=0.2, wait_timeout_s=2.0),
            recorder=Handle(self.recorder), run="a-run", **(journal or {}),
        )  # fmt: skip
        self.worker = RolloutWorker(
            rollout=RolloutConfig(**{"group_size": 2, "max_response_tokens": 16} | (rollout or {})),
            partial_rollout=partial_config,
            batch_size=batch_size,
            tokenizer=Tokenizer(),
            make_prompts=lambda: PromptSource(
                [prompts], seed=0, position=position, pending=pending
            ),
            make_client=lambda: engine,
            make_scorer=lambda: self.scorer,
            buffer=Handle(self.buffer),
            recorder=Handle(self.recorder),
            sync_timeout_s=2.0,
            policy_version=policy_version,
            make_state=make_state,
            poison=poison,
            turns=turns,
            group_filter=group_filter,
            run="a-run",
            before=before,
            **(journal or {}),
        )

    async def step(self, step: int):
        """Grant and take a batch as the trainer does; returns its samples."""
        await self.buffer.grant(step, step)
        ticket = None
        while ticket is None:
            ticket = await self.buffer.take(0, step - 1 if step else None)
        await self.buffer.ack(step)
        return [sample for group in opened(ticket.refs) for sample in group]

    async def sync(self, version: int) -> None:
        while not await self.worker.begin_sync(version):
            pass
        await self.worker.finish_sync(version)

    async def check_ledger(self, summary) -> None:
        stats = await self.buffer.stats()
        ledger = summary.ledger + stats.ledger
        assert ledger.error == 0
        assert ledger.generated == self.engine.tokens_generated


@contextlib.asynccontextmanager
async def running(*args, limit_s=20, **kwargs):
    run = Run(*args, **kwargs)
    await run.worker.start()
    try:
        async with asyncio.timeout(limit_s):
            yield run
    finally:
        run.summary = await run.worker.stop()
        await run.buffer.close()


async def until(condition) -> None:
    """Let the loops turn until a condition holds."""
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110  (nothing signals the inner state of fakes)
            await asyncio.sleep(0.005)


def without_ray(monkeypatch) -> RayMetrics:
    """Let the worker run without Ray, and retry at once; returns its metrics."""
    monkeypatch.setattr(ray, "put", lambda value: value)
    monkeypatch.setattr(ray, "get", lambda value: value)
    monkeypatch.setattr(sessions_module, "_RETRY_PAUSE_S", 0.01)
    monkeypatch.setattr(engines_module, "_END_PAUSE_S", 0.01)
    monkeypatch.setattr(worker_module, "freeze_heap", lambda: None)  # this process goes on
    return RayMetrics().install(monkeypatch)
