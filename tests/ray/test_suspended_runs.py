"""A run that was suspended with all that it has, while another driver has taken its folder."""

from __future__ import annotations

import contextlib
import os
import signal

import pytest

from ray_apr.tools.verify import verify
from tests.killed_parts import KilledRun
from tests.processes import kill_all, marked_environment, processes_of
from tests.scripted_runs import SCRIPTED

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(600)]

STEPS = 60
END_LIMIT_S = 240.0


def send(mark: str, number: signal.Signals) -> None:
    for pid in processes_of(mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def test_a_run_that_was_suspended_leaves_its_folder_to_the_one_that_took_it(tmp_path, marked):
    """Nobody told it: it wrote its rows, journal and list of checkpoints between the other's."""
    settings = (*SCRIPTED, f"train.steps={STEPS}", "train.checkpoint_every=4")
    mark, env = marked_environment()
    old, new = KilledRun(tmp_path, mark, env, settings), KilledRun(tmp_path, *marked, settings)
    try:
        old.start()
        old.wait_for_step(10)
        send(mark, signal.SIGSTOP)
        (tmp_path / "run" / ".lock").unlink()  # as where another host has not got it
        new.start()
        new.wait_for_step(20)
        send(mark, signal.SIGCONT)
        assert old.end(END_LIMIT_S) == 1, old.tail
        assert f"{tmp_path / 'run'} was taken over at " in old.tail, old.tail
        assert new.end(END_LIMIT_S) == 0, new.tail
    finally:
        kill_all(mark)
    checks = verify(tmp_path / "run")
    assert all(check.ok for check in checks), checks
