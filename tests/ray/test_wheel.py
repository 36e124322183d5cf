"""The wheel in an empty environment, in another folder: what `ray-apr init` writes runs there."""

from __future__ import annotations

import json
import shutil
import sys

import pytest

from tests.wheels import build_wheel, call

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(1800)]

BREAK_A_CPU_TORCH = ["torchvision", "torchaudio", "torchcodec"]


def test_a_wheel_in_an_empty_environment_runs_what_init_writes(tmp_path, marked):
    _, env = marked
    env = {name: value for name, value in env.items() if name not in ("PYTHONPATH", "RAY_ADDRESS")}
    wheel, venv, elsewhere = build_wheel(tmp_path), tmp_path / "venv", tmp_path / "elsewhere"
    elsewhere.mkdir()
    ray_apr = str(venv / "bin" / "ray-apr")

    def run(*command: str, folder=elsewhere, limit_s=300) -> str:
        return call(list(command), folder=folder, env=env, limit_s=limit_s)

    try:
        run(sys.executable, "-m", "venv", str(venv))
        pip = (str(venv / "bin" / "python"), "-m", "pip")
        run(*pip, "install", "-q", f"{wheel}[cpu]", limit_s=1200)
        run(*pip, "uninstall", "-q", "-y", *BREAK_A_CPU_TORCH)
        assert "no problems" in run(ray_apr, "doctor")
        run(ray_apr, "init", "mine")
        mine = elsewhere / "mine"
        assert "nothing was started" in run(ray_apr, "train", "run.yaml", "--dry-run", folder=mine)
        few = ("--set", "train.steps=4", "--set", "run.name=first")
        said = run(ray_apr, "train", "run.yaml", *few, folder=mine, limit_s=400)
        assert "step    4/4" in said
        assert "BROKEN" not in run(ray_apr, "verify", "runs/first", folder=mine)
        worst = run(ray_apr, "samples", "runs/first", "--worst", "1", folder=mine)
        assert "step 3 (counted" in worst
        final = json.loads((mine / "runs" / "first" / "final.json").read_text())
        assert (final["status"], final["steps"], final["ledger_error"]) == ("ok", 4, 0)
    finally:
        shutil.rmtree(venv, ignore_errors=True)  # four gigabytes, which pytest would keep
