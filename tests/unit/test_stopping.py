"""Ctrl-C and SIGTERM (stopping.py), and what a run then says of itself."""

from __future__ import annotations

import json
import pickle
import signal
import sys
import threading
from contextlib import nullcontext

import pytest
import ray.train

from ray_apr.config import TrainConfig
from ray_apr.core.exceptions import Stopped, TrainError
from ray_apr.run import controller
from ray_apr.run.final import write_final, write_outcome
from ray_apr.run.stopping import StopSignals
from tests.run_specs import run_spec


@pytest.mark.parametrize(
    ("number", "exit_code", "words"),
    [(signal.SIGINT, 130, "stopped by you (Ctrl-C)"), (signal.SIGTERM, 143, "stopped by SIGTERM")],
)
def test_sigterm_ends_a_run_as_ctrl_c_does(number, exit_code, words):
    before = signal.getsignal(number)
    with pytest.raises(Stopped) as caught, StopSignals().listen():
        signal.raise_signal(number)
    assert (caught.value.exit_code, str(caught.value)) == (exit_code, words)
    assert signal.getsignal(number) is before
    assert isinstance(caught.value, KeyboardInterrupt)
    assert str(pickle.loads(pickle.dumps(caught.value))) == words


@pytest.mark.parametrize(("code", "exit_code"), [(0, 130), (signal.SIGTERM, 143)])
def test_what_ray_and_ray_train_make_of_a_signal_is_one(code, exit_code):
    with pytest.raises(Stopped) as caught, StopSignals().listen():
        sys.exit(code)
    assert caught.value.exit_code == exit_code


def test_the_signal_is_known_where_ray_raises_an_interrupt_of_its_own():
    with pytest.raises(Stopped) as caught, StopSignals().listen():
        try:
            signal.raise_signal(signal.SIGTERM)
        except KeyboardInterrupt:
            raise KeyboardInterrupt from None  # as Ray's `get` does
    assert caught.value.exit_code == 143


def test_what_listens_inside_takes_the_handlers_of_others_away_again():
    signals = StopSignals()
    with pytest.raises(Stopped), signals.listen():
        ours = signal.getsignal(signal.SIGINT)
        with signals.listen():
            signal.signal(signal.SIGINT, lambda *_: sys.exit(0))  # as Ray Train does, for good
        assert signal.getsignal(signal.SIGINT) == ours
        signal.raise_signal(signal.SIGINT)


def test_a_second_sigterm_does_not_break_off_the_end_of_a_run():
    signals, written = StopSignals(), []
    with pytest.raises(Stopped) as caught, signals.listen():
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            signal.raise_signal(signal.SIGTERM)
            written.append("final.json")
    assert written and caught.value.exit_code == 143


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_first_signal_at_the_end_of_a_run_waits_and_a_second_ctrl_c_does_not(number):
    signals, written = StopSignals(), []
    with signals.listen():
        signals.check()
        with signals.put_off():
            signal.raise_signal(number)
            signal.raise_signal(signal.SIGTERM)
            written.append("final.json")
            with pytest.raises(Stopped):
                signal.raise_signal(signal.SIGINT)
        with pytest.raises(Stopped, match="SIGTERM" if number == signal.SIGTERM else "Ctrl-C"):
            signals.check()
    assert written


def test_the_second_ctrl_c_is_the_second_where_ray_train_had_the_first():
    """known fault: the end of the run put it off as the first one."""
    signals, kept = StopSignals(), []
    with pytest.raises(Stopped), signals.listen():
        try:
            with signals.listen():
                signal.signal(signal.SIGINT, lambda *_: sys.exit(0))  # as Ray Train does
                signal.raise_signal(signal.SIGINT)
        finally:
            with signals.put_off():
                signal.raise_signal(signal.SIGINT)
                kept.append("it is not broken off")
    assert not kept


class PartsThatEnd:
    """Parts of a run that has trained all of its steps, or failed; a signal comes as they end."""

    recorder = None

    def __init__(self, folder, failure) -> None:
        self.folder, self.failure = folder, failure

    def fit(self):
        if self.failure is not None:
            raise self.failure
        return "all steps"

    def close(self, error) -> None:
        signal.raise_signal(signal.SIGINT)
        write_final(self.folder, {"steps": 4}, error)


def run_to_its_end(monkeypatch, spec, failure, progress=None):
    monkeypatch.setattr(controller, "check_hub_model", lambda model: None)
    monkeypatch.setattr(controller, "check_engine", lambda *_: None)
    monkeypatch.setattr(controller, "make_run_folder", lambda spec: spec.folder.mkdir())
    monkeypatch.setattr(controller, "follow_progress", lambda *_: nullcontext(lambda: None))
    monkeypatch.setattr(controller, "_Parts", lambda *_: PartsThatEnd(spec.folder, failure))
    monkeypatch.setattr(controller.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(controller.ray, "cluster_resources", dict)
    return controller.run(spec, None, progress=progress)


def test_a_run_whose_lines_nobody_reads_goes_on(tmp_path, monkeypatch, caplog):
    """known fault: Ctrl-C ended `tee`, too, and the line that told it took the end of the run
    along, with its final.json; a run that failed did not begin again."""

    def show(line):
        raise BrokenPipeError(32, "Broken pipe")

    often = ray.train.FailureConfig(max_failures=1)
    run = ray.train.RunConfig(name="mine", storage_path=str(tmp_path), failure_config=often)
    spec = run_spec(run=run, train=TrainConfig(steps=4, checkpoint_every=1))
    monkeypatch.setattr(PartsThatEnd, "close", lambda parts, error: None)
    monkeypatch.setattr(controller.time, "sleep", lambda seconds: None)
    failure = TrainError("a worker died")
    with pytest.raises(TrainError):
        run_to_its_end(monkeypatch, spec, failure, progress=show)
    assert len((spec.folder / "ranks.jsonl").read_text().splitlines()) == 2, "it began again"
    told = [r.getMessage() for r in caplog.records if "a line of progress is lost" in r.message]
    assert len(told) == 1 and "BrokenPipeError" in told[0], "once"


def test_ctrl_c_while_a_run_that_has_trained_all_ends_leaves_it_whole(tmp_path, monkeypatch):
    """known fault: its final.json was missing, and nothing could be gone on with."""
    run = ray.train.RunConfig(name="mine", storage_path=str(tmp_path))
    spec = run_spec(run=run, train=TrainConfig(steps=4))
    assert run_to_its_end(monkeypatch, spec, None) == "all steps"
    assert json.loads((spec.folder / "final.json").read_text()) == {
        "steps": 4, "status": "ok", "error": None,
    }  # fmt: skip


@pytest.mark.parametrize("max_failures", [0, 3])
def test_ctrl_c_while_a_run_that_has_failed_ends_is_its_end(tmp_path, monkeypatch, max_failures):
    often = ray.train.FailureConfig(max_failures=max_failures)
    run = ray.train.RunConfig(name="mine", storage_path=str(tmp_path), failure_config=often)
    spec = run_spec(run=run, train=TrainConfig(steps=4, checkpoint_every=1))
    with pytest.raises(Stopped if max_failures else TrainError):
        run_to_its_end(monkeypatch, spec, TrainError("a worker died"))
    final = json.loads((spec.folder / "final.json").read_text())
    assert final["status"] == ("stopped" if max_failures else "failed")


def test_errors_pass_and_other_threads_are_left_alone():
    with pytest.raises(TrainError), StopSignals().listen():
        raise TrainError("a NaN")
    done = []

    def elsewhere():
        with StopSignals().listen():
            done.append(True)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert done


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (None, {"status": "ok", "error": None}),
        (Stopped(), {"status": "stopped", "error": "stopped by you (Ctrl-C)"}),
        (Stopped(signal.SIGTERM), {"status": "stopped", "error": "stopped by SIGTERM"}),
        (TrainError("a NaN"), {"status": "failed", "error": "TrainError: a NaN"}),
    ],
)
def test_final_json_tells_a_stopped_run_from_a_failed_one(tmp_path, error, outcome):
    write_final(tmp_path, {"steps": 3}, TrainError("a worker died"))
    write_outcome(tmp_path, error)
    assert json.loads((tmp_path / "final.json").read_text()) == {"steps": 3} | outcome


def test_a_run_that_is_stopped_before_it_goes_on_again_was_stopped(tmp_path, monkeypatch):
    often = ray.train.FailureConfig(max_failures=3)
    run = ray.train.RunConfig(name="mine", storage_path=str(tmp_path), failure_config=often)
    spec = run_spec(run=run, train=TrainConfig(steps=4, checkpoint_every=1))

    def fail(*_):
        write_final(spec.folder, {}, TrainError("a worker died"))
        raise TrainError("a worker died")

    monkeypatch.setattr(controller, "check_hub_model", lambda model: None)
    monkeypatch.setattr(controller, "check_engine", lambda *_: None)
    monkeypatch.setattr(controller, "make_run_folder", lambda spec: spec.folder.mkdir())
    monkeypatch.setattr(controller, "_run_parts", fail)
    monkeypatch.setattr(controller.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(controller.ray, "cluster_resources", dict)
    monkeypatch.setattr(controller.time, "sleep", lambda s: signal.raise_signal(signal.SIGINT))
    with pytest.raises(Stopped):
        controller.run(spec, None)
    assert json.loads((spec.folder / "final.json").read_text())["status"] == "stopped"
