"""Profiles of steps, and the trace that has them beside what engines and trainer did."""

from __future__ import annotations

import gzip
import json
from types import SimpleNamespace

import pytest
import torch

from ray_apr.cli.main import main
from ray_apr.config import TrainConfig
from ray_apr.core.clock import unix_s
from ray_apr.core.exceptions import ConfigError, StarvedError
from ray_apr.core.profiles import PROFILES
from ray_apr.run.recorder import RunRecorder
from ray_apr.tools.trace import write_trace
from ray_apr.train import profiling
from tests.fakes import step_row


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
