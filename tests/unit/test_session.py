"""Runs that are trained a few steps at a time (session.py), and their host (host.py)."""

from __future__ import annotations

import json
import os
import types

import pytest
import ray.train
from ray.exceptions import ActorDiedError

from ray_apr.config import TrainConfig
from ray_apr.core.exceptions import APRError, ConfigError, RewardError, Stopped, TrainError
from ray_apr.run import host as host_module
from ray_apr.run.final import write_final
from ray_apr.run.host import HostedRun, _as_value, _host
from ray_apr.session import TrainingSession
from tests.fakes import FakeHostedRun
from tests.run_specs import run_spec


@pytest.fixture
def run(tmp_path):
    settings = ray.train.RunConfig(name="run", storage_path=str(tmp_path))
    return FakeHostedRun(run_spec(train=TrainConfig(steps=5), run=settings))


@pytest.fixture
def session(run):
    return TrainingSession(types.SimpleNamespace(spec=run.spec, start_in_host=run.start))


def test_steps_are_trained_when_they_are_asked_for_and_their_rows_come_once(session, run):
    assert session.step == 0
    run.evaluate(0)
    first = session.train(2)
    assert [row["step"] for row in first.steps] == [0, 1]
    assert [row["policy_version"] for row in first.evaluations] == [0]
    run.evaluate(2)
    second = session.train(1)
    assert [row["step"] for row in second.steps] == [2]
    assert [row["policy_version"] for row in second.evaluations] == [2]
    assert (session.step, run.is_over) == (3, False)


def test_at_the_end_there_are_fewer_rows_and_then_none(session, run):
    session.train(3)
    last = session.train(9)
    assert [row["step"] for row in last.steps] == [3, 4]
    assert run.is_over, "the last evaluation has ended"
    assert [row["policy_version"] for row in last.evaluations] == [5]
    assert session.train(1).steps == []
    assert session.stop()["status"] == "ok"


def test_a_checkpoint_is_ordered_and_copied(session, run, tmp_path):
    session.train(1)
    session.save(tmp_path / "here")
    assert (tmp_path / "here" / "progress.json").read_text() == '{"step": 1}'
    session.train(4)
    session.save(tmp_path / "last")
    assert (tmp_path / "last" / "progress.json").read_text() == '{"step": 5}'
    assert run.num_saved == 2, "the last one is the run's own"


def test_an_error_of_the_run_comes_out_of_each_call(session, run, tmp_path):
    session.train(1)
    run.fail(TrainError("a NaN"))
    for call in (lambda: session.train(1), lambda: session.save(tmp_path / "here")):
        with pytest.raises(TrainError, match="a NaN"):
            call()
    assert session.stop()["status"] == "failed"


def test_a_call_that_was_interrupted_is_not_ordered_twice(session, run):
    run.interrupts = True
    with pytest.raises(KeyboardInterrupt):
        session.train(2)
    assert session.step == 0
    assert [row["step"] for row in session.train(1).steps] == [0, 1], "both were trained"
    assert session.step == 2


def test_a_stopped_session_trains_nothing(session, run, tmp_path):
    session.train(1)
    assert session.stop()["status"] == session.stop()["status"] == "stopped"
    assert run.num_stops == 1
    for call in (lambda: session.train(1), lambda: session.save(tmp_path / "here")):
        with pytest.raises(APRError, match="was stopped"):
            call()


def test_the_end_of_an_earlier_part_is_not_that_of_a_session(run, monkeypatch):
    """It is there until the host begins, which one that is stopped at once never does."""
    (run.spec.folder / "final.json").write_text('{"status": "ok", "steps": 3}')
    trainer = types.SimpleNamespace(spec=run.spec, start_in_host=run.start)
    monkeypatch.setattr(run, "_end", lambda status: None)
    session = TrainingSession(trainer)
    assert session.stop() == session.stop() == {}


@pytest.mark.parametrize("num_steps", [0, -1, 1.0, True])
def test_what_is_no_number_of_steps_is_refused(session, num_steps):
    with pytest.raises(ConfigError, match="num_steps"):
        session.train(num_steps)


class OfTheUser(Exception):
    def __init__(self, one: str, two: str) -> None:
        super().__init__(one + two)  # cannot be unpickled


@pytest.fixture
def own_words(monkeypatch):
    """What a host makes of SIGINT is forgotten after the test: elsewhere its process ends."""
    monkeypatch.setattr(Stopped, "of_sigint", Stopped.of_sigint)


def test_a_host_that_is_cancelled_was_not_interrupted_by_the_user(monkeypatch, tmp_path, own_words):
    """known fault: the report of a session that ended early said "stopped by you (Ctrl-C)"."""

    def run(*_, **__):
        write_final(tmp_path, {}, Stopped())

    monkeypatch.setattr(host_module.controller, "run", run)
    monkeypatch.chdir(tmp_path)
    assert str(Stopped()) == "stopped by you (Ctrl-C)"
    _host(run_spec(), None, None, None, False, (), str(tmp_path), {})
    final = json.loads((tmp_path / "final.json").read_text())
    assert (final["status"], final["error"]) == ("stopped", "stopped by its session or its trial")


def test_what_a_run_raises_in_its_host_is_what_it_raises_here(monkeypatch, tmp_path, own_words):
    error = RewardError("e0-1", "raised", "KeyError: 'answer'")
    error.add_note("traceback: error.log")
    for raised in (error, Stopped(15), ValueError("no row")):

        def run(*_, raised=raised, **__):
            raise raised

        monkeypatch.setattr(host_module.controller, "run", run)
        monkeypatch.chdir(tmp_path)
        ended = _host(run_spec(), None, None, None, False, (), str(tmp_path), {})
        assert ended.error is raised
    sent = _as_value(OfTheUser("no ", "row"))
    assert isinstance(sent, APRError) and "no row" in str(sent)


def test_a_host_has_the_folder_and_the_variables_of_its_caller(monkeypatch, tmp_path, own_words):
    seen = {}

    def run(spec, prompts, held_out, *, progress, gate, callbacks):
        seen.update(folder=os.getcwd(), variable=os.environ["VLLM_OF_THE_TEST"], gate=gate)
        seen["callbacks"] = callbacks
        return "result"

    monkeypatch.chdir(tmp_path.parent)
    monkeypatch.setenv("VLLM_OF_THE_TEST", "")
    monkeypatch.setattr(host_module.controller, "run", run)
    told, variables = ("a callback",), {"VLLM_OF_THE_TEST": "1"}
    ended = _host(run_spec(), None, None, "gate", True, told, str(tmp_path), variables)
    assert (ended.result, ended.error) == ("result", None)
    assert seen == {"folder": str(tmp_path), "variable": "1", "gate": "gate", "callbacks": told}


def test_a_gate_that_is_gone_is_an_error_of_ours(monkeypatch):
    def get(answer, timeout):
        raise ActorDiedError()

    monkeypatch.setattr(host_module.ray, "get", get)
    run = object.__new__(HostedRun)
    run.spec = run_spec()
    run._gate = types.SimpleNamespace(order=types.SimpleNamespace(remote=lambda orders: None))
    with pytest.raises(APRError, match="the gate of app is gone"):
        run.order([None])


def test_a_run_in_its_host_has_the_variables_of_trackers(monkeypatch):
    given = {"WANDB_API_KEY": "a", "MLFLOW_TRACKING_URI": "b", "HF_TOKEN": "c", "OTHER_KEY": "d"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    found = host_module._variables()
    assert {name: found.get(name) for name in given} == {**given, "OTHER_KEY": None}
