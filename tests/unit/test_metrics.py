"""The metrics that a run shows (metrics.py), where they are set, and their tags."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from pathlib import Path

import pytest

from ray_apr.config import EvaluationConfig, RolloutConfig
from ray_apr.core.metrics import SPECS, Metrics
from ray_apr.core.sample import Prompt
from ray_apr.data.buffer import SampleBuffer
from ray_apr.data.movement import Moves
from ray_apr.rollout.engines import EngineWatch
from ray_apr.rollout.evaluation import Evaluator
from ray_apr.train.control import RunControl
from ray_apr.train.publish import NO_SYNC
from ray_apr.train.shown import GAUGES, HISTOGRAMS
from tests.fakes import RayMetrics, ScriptedEngine
from tests.rollout_run import Handle, Recorder, Scorer, Tokenizer, running, until, without_ray

RUN = {"run": "a-run"}


@pytest.fixture
def shown(monkeypatch) -> RayMetrics:
    return RayMetrics().install(monkeypatch)


def test_names_descriptions_and_buckets_are_such_as_ray_takes():
    assert len({spec.name for spec in SPECS}) == len(SPECS)
    for spec in SPECS:
        assert re.fullmatch(r"apr(_[a-z]+)+", spec.name), "Ray drops names with a slash"
        assert spec.description.endswith("."), spec.name
        assert min(spec.boundaries) > 0 and list(spec.boundaries) == sorted(spec.boundaries)
        assert spec.all_tags[0] == "run" and len(set(spec.all_tags)) == len(spec.all_tags)


def test_each_metric_has_the_tag_of_its_run(shown):
    metrics = Metrics("a-run")
    verbs = {"counter": metrics.add, "gauge": metrics.set, "histogram": metrics.observe}
    for spec in SPECS:
        tags = dict.fromkeys(spec.tag_keys, "x")
        verbs[spec.kind](spec.name, 1.0, **tags)
        assert shown.of(spec.name, **RUN, **tags) == [1.0]


def test_the_docs_list_every_metric():
    page = (Path(__file__).parents[2] / "docs/dashboard.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `(ray_apr_\w+)` \| (\w+) \| (.*?) \| (.*) \|$", page, re.MULTILINE)
    assert listed == [
        (s.exported, s.kind, ", ".join(s.tag_keys) or "–", s.description) for s in SPECS
    ]


def test_a_metric_of_another_kind_is_refused(shown):
    with pytest.raises(TypeError, match="apr_buffer_samples is a gauge, not a counter"):
        Metrics("a-run").add("apr_buffer_samples")


def test_a_counter_follows_a_total_that_is_kept_elsewhere(shown):
    metrics = Metrics("a-run")
    for total in (0, 2, 2, 5, 4, 6):
        metrics.raise_to("apr_rollout_discarded_tokens", total, reason="stale")
    assert shown.of("apr_rollout_discarded_tokens", **RUN, reason="stale") == [2, 3, 1]


async def test_queues_and_their_limits_lengths_and_discards_of_a_run(monkeypatch):
    shown = without_ray(monkeypatch)
    engine = ScriptedEngine(default_length=6)
    settings = {"max_staleness": 2, "oversampling_factor": 1.5, "max_inflight": 3}
    async with running(
        engine, interrupt="weight_sync", after_interrupt="restart", **settings
    ) as run:
        await until(lambda: shown.of("apr_rollout_inflight_samples", **RUN))
        await until(lambda: len(engine.running) == 3)
        engine.advance(2)
        await run.sync(1)
        await until(lambda: len(engine.running) == 3)
        scheduler = run.worker._scheduler
        run.worker._figures._set_gauges(scheduler.counts(), scheduler.live.ledger.snapshot())
        dropped = shown.of("apr_rollout_discarded_tokens", **RUN, reason="restarted")
        assert sum(dropped) == 6
        assert shown.of("apr_rollout_inflight_samples", **RUN)[-1] == 3
        assert shown.of("apr_rollout_inflight_limit_samples", **RUN)[-1] == 3
        assert shown.of("apr_rollout_unfinished_limit_samples", **RUN)[-1] == 6
        assert shown.of("apr_rollout_unfinished_samples", **RUN)[-1] == 6
        assert shown.of("apr_buffer_limit_samples", **RUN)[-1] == (2 + 1) * 4
        await run.worker._figures.show(engine)
        status = next(row for row in reversed(run.recorder.rows) if row["kind"] == "status")
        assert (status["buffered"], status["engines_version"]) == (0, 1)
        trained = asyncio.create_task(run.step(1))
        while not trained.done():
            engine.advance(1)
            await asyncio.sleep(0.001)
    assert set(shown.of("apr_rollout_response_tokens", **RUN)) == {6}
    assert shown.of("apr_buffer_trained_response_tokens", **RUN) == [6] * 4
    assert shown.of("apr_buffer_trained_staleness_steps", **RUN) == [0] * 4
    assert sum(shown.of("apr_buffer_trained_tokens", **RUN)) == 24
    for name, tags in shown.values:
        assert ("run", "a-run") in tags, name


@pytest.mark.parametrize(
    ("limits", "most"),
    [
        ({"max_live_batches": 2.5}, 10),
        ({"max_live_batches": 2.5, "sync_every": 2}, 14),
        ({"max_live_batches": None}, 20),
    ],
)
async def test_the_limit_of_the_buffer_is_the_tighter_one(monkeypatch, limits, most):
    """known fault: it was that of the staleness alone, so that a buffer that was full by
    `max_live_batches` was shown far below its limit."""
    shown = without_ray(monkeypatch)
    async with running(ScriptedEngine(), max_staleness=4, **limits):
        await until(lambda: shown.of("apr_buffer_limit_samples", **RUN))
    assert set(shown.of("apr_buffer_limit_samples", **RUN)) == {most}


async def test_what_engines_spend_their_time_on_adds_up_to_their_time(shown):
    client = ScriptedEngine()
    (begin,) = await client.status()
    busy = replace(begin, uptime_s=10.0, busy_s=6.0, paused_s=1.0)
    later = replace(begin, uptime_s=20.0, busy_s=9.0, paused_s=1.0)
    watch = EngineWatch(_Dispatcher(), None, Metrics("a-run"), is_adaptive=False)
    for status in (busy, later):
        watch._count_activity(status)
    found = {
        activity: shown.of(
            "apr_server_activity_seconds", **RUN, replica=begin.replica_id, activity=activity
        )
        for activity in ("generate", "paused", "idle")
    }
    assert found == {"generate": [6.0, 3.0], "paused": [1.0], "idle": [3.0, 7.0]}


async def test_a_trainer_that_waits_for_its_batch_shows_for_how_long(shown):
    buffer = SampleBuffer(
        batch_size=4, max_staleness=0, num_ranks=1, micro_batch_tokens=64, config=None,
        recorder=None, run="a-run",
    )  # fmt: skip
    moves = Moves(tokens=0, rewards=0, engines=0)
    await buffer.report_rollout("", moves)
    await buffer.grant(0, 0)
    await buffer.report_rollout("", moves)
    first, second = shown.of("apr_buffer_batch_wait_seconds", **RUN)
    assert first == 0 and second > 0


async def test_an_evaluation_shows_its_score_and_its_samples(monkeypatch, shown):
    prompts = [Prompt(prompt_id=f"p{i}", token_ids=(1,), row={}) for i in range(3)]
    evaluator = Evaluator(
        rollout=RolloutConfig(max_response_tokens=4),
        config=EvaluationConfig(at_start=False),
        tokenizer=Tokenizer(),
        make_prompts=lambda: prompts,
        make_client=lambda: ScriptedEngine(default_length=2, auto=1),
        make_scorer=lambda: Scorer(bad=["evaluation-7-p0-0"]),
        recorder=Handle(Recorder()),
        run="a-run",
    )
    await evaluator.connect()
    await evaluator.evaluate(7)
    assert shown.of("apr_evaluation_reward_mean", **RUN) == [1.0]
    assert shown.of("apr_evaluation_policy_version", **RUN) == [7]
    assert shown.of("apr_evaluation_samples", **RUN, outcome="scored") == [2]
    assert shown.of("apr_evaluation_samples", **RUN, outcome="failed") == [1]


def test_a_step_shows_the_parts_of_its_sync_if_it_had_one(shown):
    row = dict.fromkeys((*GAUGES, *HISTOGRAMS), 2.0)
    control = RunControl(
        buffer=None, worker=None, recorder=Handle(_Silent()), sync_timeout_s=1.0, run="a-run"
    )
    control.record_step(row)
    control.record_step({**row, **NO_SYNC})
    for part in ("sync", "gather", "generation_stopped"):
        assert shown.of(f"apr_weight_{part}_seconds", **RUN) == [2.0]
    assert shown.of("apr_trainer_sync_wait_seconds", **RUN) == [2.0, 0.0]
    assert shown.of("apr_trainer_loss", **RUN) == [2.0, 2.0]


def test_the_trainers_time_is_counted_by_what_it_does(shown):
    control = RunControl(
        buffer=None, worker=None, recorder=Handle(_Silent()), sync_timeout_s=1.0, run="a-run"
    )
    control.record_span("wait", 10.0, 12.5)
    control.record_span("train", 12.5, 13.0)
    control.record_span("sync", 10.0, 20.0, actor="weights")
    assert shown.of("apr_trainer_activity_seconds", **RUN, activity="wait") == [2.5]
    assert shown.of("apr_trainer_activity_seconds", **RUN, activity="train") == [0.5]
    assert shown.of("apr_trainer_activity_seconds", **RUN, activity="sync") == []


class _Dispatcher:
    """A dispatcher without samples."""

    max_inflight = 1


class _Silent:
    """A recorder that takes rows and keeps none."""

    def record(self, kind, row) -> None:
        pass
