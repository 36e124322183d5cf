"""Examples on CPU with the smallest settings: YAML files and one in Python as a user would run
them, the others one after the other on one cluster (tests/example_runs.py). Each takes half a
minute of two cores, nearly all of it to start the processes of its run; the schedulers of Tune take
minutes, and are long."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from ray_apr.cli.main import main
from ray_apr.run.trained_samples import read_step, saved_steps
from tests.example_runs import ENDED
from tests.processes import marked_processes
from tests.tracked import read_tensorboard

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(700)]

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = (
    "rollout.num_replicas=1", "scaling.num_workers=1", "train.batch_size=16",
    "rollout.max_response_tokens=64",
)  # fmt: skip
"""Settings of a YAML file."""


RunExample = Callable[[str], str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the examples run."""
    return tmp_path_factory.mktemp("examples")


@pytest.fixture(scope="module")
def run(folder: Path) -> Iterator[RunExample]:
    """Has an example run to its good end; returns what it printed.

    Waits for: the end of an example. Unblocked by: it, or the limit of its test.
    """
    with marked_processes() as (_, env):
        modules = os.pathsep.join(map(str, (EXAMPLES.parent, EXAMPLES / "arithmetic")))
        env |= {"PYTHONPATH": modules, "HOME": str(folder)}  # RLlib writes to ~/ray_results
        env.setdefault("VLLM_CACHE_ROOT", str(Path.home() / ".cache" / "vllm"))
        with subprocess.Popen(
            [sys.executable, "-m", "tests.example_runs"], env=env, cwd=folder, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        ) as process:  # fmt: skip
            assert process.stdin is not None and process.stdout is not None
            calls, lines = process.stdin, process.stdout

            def one(call: str) -> str:
                calls.write(f"{call}\n")
                calls.flush()
                said: list[str] = []
                for line in lines:
                    if line.startswith(ENDED):
                        break
                    said.append(line)
                else:
                    line = "the process of the examples is dead"
                assert line.startswith(f"{ENDED} well"), "".join(said)[-6000:] + line
                return "".join(said)

            yield one
            calls.close()
            assert process.wait(timeout=60) == 0


def final_of(folder: Path) -> tuple[str, int, int]:
    """Status, ledger error and steps of a run."""
    final = json.loads((folder / "final.json").read_text())
    return final["status"], final["ledger_error"], final["steps"]


def run_alone(env: dict[str, str], folder: Path, *command: str, limit_s: float = 600.0) -> str:
    """Run Python in a folder to its good end; what it printed."""
    ended = subprocess.run(
        [sys.executable, *command], env=env, cwd=folder, text=True, timeout=limit_s, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout[-6000:]
    return ended.stdout


def train(env: dict[str, str], folder: Path, file: str, *settings: str) -> Path:
    """Train by a YAML file of the examples; the run's folder."""
    given = (*SMALL, f"run.storage_path={folder}", "run.name=run", *settings)
    flags = [f"--set={setting}" for setting in given]
    run_alone(env, folder, "-m", "ray_apr", "train", str(EXAMPLES / file), *flags)
    return folder / "run"


def test_a_run_in_one_file_is_followed_and_its_samples_can_be_read(tmp_path, marked, capsys):
    _, env = marked
    said = run_alone(
        env, tmp_path, str(EXAMPLES / "single_file.py"), "--steps", "4", "--storage", "."
    )
    assert "step    4/4" in said and "best reward 0." in said
    folder = tmp_path / "single-file"
    assert final_of(folder) == ("ok", 0, 4)
    assert saved_steps(folder) == [0, 1, 2, 3], "the last step's, too"
    rows = read_step(folder, 3)
    assert len(rows) == 64
    assert all(row["num_generated"] and row["prompt"].endswith("=") for row in rows)
    assert any(row["response_text"] for row in rows), "that of one which ends at once is empty"
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    board = read_tensorboard(folder)
    for row in steps:
        assert board["reward_mean", row["step"]] == pytest.approx(row["reward_mean"])
    assert "reward" in board["samples", 0]
    assert main(["samples", str(folder), "--worst", "1"]) == 0
    assert "step 3 (counted from 0): reward 0;" in capsys.readouterr().out
    assert main(["verify", str(folder)]) == 0


@pytest.mark.long
def test_a_calculator_and_weights_as_files(tmp_path, marked):
    _, env = marked
    transport = EXAMPLES / "transports" / "folder.py"
    folder = train(
        env, tmp_path, "calculator/calculator.yaml", "rollout.max_turns=6", "train.steps=2",
        f"train.weight_transport={transport}:FolderSender",
    )  # fmt: skip
    assert final_of(folder) == ("ok", 0, 2)
    final = json.loads((folder / "final.json").read_text())
    assert [engine["policy_version"] for engine in final["engines"]] == [1]
    assert max(row["num_turns"] for row in read_step(folder, 0)) >= 2


@pytest.mark.long
def test_reasoning_gym(tmp_path, marked):
    if importlib.util.find_spec("reasoning_gym") is None:
        pytest.skip("needs the extra rewards-gym")
    _, env = marked
    task = EXAMPLES / "reasoning_gym" / "make_task.py"
    run_alone(env, tmp_path, str(task), "--num-rows", "8", "--out", ".")
    folder = train(
        env, tmp_path, "reasoning_gym/reasoning_gym.yaml", "train.steps=1",
        "algorithm.overlong_buffer_tokens=16",
        f"model={tmp_path}/base_model", f"prompts={tmp_path}/prompts.parquet",
    )  # fmt: skip
    assert final_of(folder) == ("ok", 0, 1)


@pytest.mark.long
def test_maths_and_rejection_sampling(run, folder):
    said = run("maths --steps 1 --storage .")
    assert "with an answer at all" in said
    assert final_of(folder / "maths") == ("ok", 0, 1)
    run("rejection_sampling maths")
    samples = read_step(folder / "maths", 0)
    right = [row for row in samples if row["reward"] == 1 and row["finish_reason"] == "stop"]
    chosen = {row["prompt"]: row for row in pq.read_table(folder / "maths/chosen").to_pylist()}
    assert set(chosen) == {row["prompt"] for row in right} != set()
    for row in right:
        assert len(chosen[row["prompt"]]["completion"]) <= len(row["response_text"])


@pytest.mark.long
def test_programs(run, folder):
    assert "of the programs passed their test" in run("programs --steps 1 --storage .")
    assert final_of(folder / "programs") == ("ok", 0, 1)


def test_a_tool(run, folder):
    assert "calls of the tool a response" in run("tool_use --steps 1 --storage .")
    assert final_of(folder / "tool-use") == ("ok", 0, 1)
    turns = [row["num_turns"] for row in read_step(folder / "tool-use", 0)]
    assert max(turns) >= 3, "two columns, and the answer"


@pytest.mark.long
def test_a_judge(run, folder):
    run("llm_judge --steps 1 --storage .")
    assert final_of(folder / "llm-judge") == ("ok", 0, 1)
    row = json.loads((folder / "llm-judge/metrics.jsonl").read_text())
    assert row["reward_mean"] == pytest.approx(row["reward/judged_mean"])
    assert 0 < row["reward/judged_mean"] < 1


def test_evaluation_alone(run, folder):
    said = run("evaluate --samples 2 --storage . --name evaluate")
    assert "128 responses: mean reward 0." in said and "pass@2 0." in said
    assert final_of(folder / "evaluate") == ("stopped", 0, 0)


@pytest.mark.long
def test_a_sweep(run, folder):
    said = run("tune_sweep --lr 1e-4 --steps 1 --storage .")
    assert "lr 0.0001: reward 0." in said
    assert "best mean of the last steps: lr 0.0001" in said
    assert f"compare: ray-apr report {folder.resolve() / 'lr-0.0001'} " in said
    assert final_of(folder / "lr-0.0001") == ("ok", 0, 1)


def test_an_algorithm_of_rllib(run, folder):
    said = run("arithmetic/rllib_arithmetic --iterations 1 --save saved")
    assert "iteration   1,   4 steps: reward 0." in said
    assert (folder / "saved" / "rllib_checkpoint.json").exists()


@pytest.mark.long
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    ("example", "iterations", "said"),
    [("tune_asha", 3, " goes on: reward 0."), ("tune_pbt", 2, "1 times a trial took over")],
)
def test_schedulers_of_tune(example, iterations, said, tmp_path, marked):
    _, env = marked
    printed = run_alone(
        env | {"HOME": str(tmp_path)}, tmp_path, str(EXAMPLES / f"arithmetic/{example}.py"),
        "--iterations", str(iterations), "--storage", ".", limit_s=1400.0,
    )  # fmt: skip
    assert said in printed
