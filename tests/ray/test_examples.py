"""Examples in Python, run as a user would, with few steps."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ray_apr.cli.main import main
from ray_apr.run.trained_samples import read_step, saved_steps
from tests.tracked import read_tensorboard

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(420)]

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_a_run_in_one_file_is_followed_and_its_samples_can_be_read(tmp_path, marked, capsys):
    _, env = marked
    ended = subprocess.run(
        [sys.executable, EXAMPLES / "single_file.py", "--steps", "4", "--storage", tmp_path],
        env=env, capture_output=True, text=True, timeout=400, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    assert "step    4/4" in ended.stdout and "best reward 0." in ended.stdout
    folder = tmp_path / "single-file"
    final = json.loads((folder / "final.json").read_text())
    assert (final["status"], final["ledger_error"], final["steps"]) == ("ok", 0, 4)
    assert saved_steps(folder) == [0, 1, 2, 3], "the last step's, too"
    rows = read_step(folder, 3)
    assert len(rows) == 64
    assert all(row["response_text"] and row["prompt"].endswith("=") for row in rows)
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    board = read_tensorboard(folder)
    for row in steps:
        assert board["reward_mean", row["step"]] == pytest.approx(row["reward_mean"])
    assert "reward" in board["samples", 0]
    assert main(["samples", str(folder), "--worst", "1"]) == 0
    assert "step 3: reward 0;" in capsys.readouterr().out
    assert main(["verify", str(folder)]) == 0
