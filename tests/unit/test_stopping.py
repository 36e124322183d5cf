"""Ctrl-C and SIGTERM (stopping.py), and what a run then says of itself."""

from __future__ import annotations

import pickle
import signal
import sys
import threading

import pytest

from ray_apr.core.exceptions import Stopped, TrainError
from ray_apr.run import controller
from ray_apr.run.stopping import StopSignals


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
def test_final_json_tells_a_stopped_run_from_a_failed_one(error, outcome):
    assert controller._outcome(error) == outcome
