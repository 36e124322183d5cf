"""Examples in Python, run as a user would, with few steps."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from ray_apr.cli.main import main
from ray_apr.run.trained_samples import read_step, saved_steps
from tests.tracked import read_tensorboard

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(420)]

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(arguments: list[str], env: dict[str, str], folder: Path) -> str:
    """Run Python in a folder to its good end; returns what it printed."""
    ended = subprocess.run(
        [sys.executable, *arguments],
        env=env, capture_output=True, text=True, timeout=400, check=False, cwd=folder,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    return ended.stdout


def run_on_one_cluster(calls: list[str], env: dict[str, str], folder: Path) -> str:
    """Run examples, each ``"NAME ARGUMENTS"``, one after the other (tests/example_runs.py)."""
    root = str(EXAMPLES.parent)
    return run(["-m", "tests.example_runs", *calls], {**env, "PYTHONPATH": root}, folder)


def final_of(folder: Path) -> tuple[str, int, int]:
    """Status, ledger error and steps of a run."""
    final = json.loads((folder / "final.json").read_text())
    return final["status"], final["ledger_error"], final["steps"]


def test_a_run_in_one_file_is_followed_and_its_samples_can_be_read(tmp_path, marked, capsys):
    _, env = marked
    arguments = [str(EXAMPLES / "single_file.py"), "--steps", "4", "--storage", str(tmp_path)]
    said = run(arguments, env, tmp_path)
    assert "step    4/4" in said and "best reward 0." in said
    folder = tmp_path / "single-file"
    assert final_of(folder) == ("ok", 0, 4)
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
    assert "step 3 (counted from 0): reward 0;" in capsys.readouterr().out
    assert main(["verify", str(folder)]) == 0


@pytest.mark.long
def test_maths_and_rejection_sampling(tmp_path, marked):
    _, env = marked
    calls = ["maths --steps 2 --storage .", "rejection_sampling maths"]
    said = run_on_one_cluster(calls, env, tmp_path)
    assert final_of(tmp_path / "maths") == ("ok", 0, 2)
    assert "with an answer at all" in said
    samples = [row for step in (0, 1) for row in read_step(tmp_path / "maths", step)]
    right = [row for row in samples if row["reward"] == 1 and row["finish_reason"] == "stop"]
    chosen = {row["prompt"]: row for row in pq.read_table(tmp_path / "maths/chosen").to_pylist()}
    assert set(chosen) == {row["prompt"] for row in right} != set()
    for row in right:
        assert len(chosen[row["prompt"]]["completion"]) <= len(row["response_text"])


@pytest.mark.long
def test_programs_a_tool_a_judge_and_evaluation_alone(tmp_path, marked):
    _, env = marked
    calls = ["programs --steps 2 --storage .", "tool_use --steps 2 --storage .",
             "llm_judge --steps 2 --storage .", "evaluate --samples 4 --storage ."]  # fmt: skip
    said = run_on_one_cluster(calls, env, tmp_path)
    for name in ("programs", "tool-use", "llm-judge"):
        assert final_of(tmp_path / name) == ("ok", 0, 2)
    assert "of the programs passed their test" in said
    turns = [row["num_turns"] for row in read_step(tmp_path / "tool-use", 1)]
    assert max(turns) >= 3, "two columns, and the answer"
    assert "calls of the tool a response" in said
    rows = [json.loads(r) for r in (tmp_path / "llm-judge/metrics.jsonl").read_text().splitlines()]
    for row in rows:
        assert row["reward_mean"] == pytest.approx(row["reward/judged_mean"])
        assert 0 < row["reward/judged_mean"] < 1
    assert "256 responses: mean reward 0." in said and "pass@4 0." in said
    assert final_of(tmp_path / "evaluate") == ("stopped", 0, 0)


@pytest.mark.long
def test_a_sweep_of_two_learning_rates(tmp_path, marked):
    _, env = marked
    arguments = [str(EXAMPLES / "tune_sweep.py"), "--steps", "2", "--storage", "."]
    said = run(arguments, env, tmp_path)
    assert "lr 0.0001: reward 0." in said and "lr 1e-05: reward 0." in said
    assert "best mean of the last steps: lr " in said
    assert f"compare: ray-apr report {tmp_path.resolve() / 'lr-0.0001'} " in said
    for name in ("lr-0.0001", "lr-1e-05"):
        assert final_of(tmp_path / name) == ("ok", 0, 2)


@pytest.mark.long
def test_an_algorithm_of_rllib(tmp_path, marked):
    _, env = marked
    file = EXAMPLES / "arithmetic" / "rllib_arithmetic.py"
    env = {**env, "HOME": str(tmp_path)}  # RLlib's own folder, ~/ray_results
    said = run([str(file), "--iterations", "1", "--save", "saved"], env, tmp_path)
    assert "iteration   1,   4 steps: reward 0." in said
    assert (tmp_path / "saved" / "rllib_checkpoint.json").exists()
