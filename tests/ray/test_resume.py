"""A run that was killed goes on with its last checkpoint."""

from __future__ import annotations

import signal

import pytest

from tests.resumed_runs import SMALL, check_run, run_once
from tests.whole_runs import start_run

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(700)]


def test_a_killed_run_goes_on_where_its_checkpoint_is(tmp_path, marked):
    _, env = marked
    settings, folder = ("train.steps=7", "train.checkpoint_every=2"), tmp_path / "run"
    run_once(tmp_path, env, *settings, stop_at=3, kill=signal.SIGKILL)
    assert not (folder / "final.json").exists()
    said = run_once(tmp_path, env, *settings, stop_at=None, kill=signal.SIGINT)
    figures = check_run(folder, steps=7, resumes=1)
    (resumed,) = figures["resumes"]
    assert resumed["step"] in (2, 4, 6) and resumed["ended"] == "killed"
    assert f"goes on with step {resumed['step'] + 1} of 7" in said
    assert "other settings" not in said
    again = start_run(tmp_path, env, *SMALL, *settings)
    refused, _ = again.communicate(timeout=120)
    assert again.returncode == 2 and "none is left" in refused, refused
    assert (folder / "final.json").exists(), "what it refuses it leaves alone"
